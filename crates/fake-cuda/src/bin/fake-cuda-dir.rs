//! Prints a directory to put on `LD_LIBRARY_PATH`: `fake-cuda-dir [DRIVER_VERSION] [--without ENTRY] [--no-nvrtc]`.

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    let mut build = fake_cuda::Build::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        build = match (argument.as_str(), argument.parse::<u32>()) {
            (_, Ok(version @ 10_000..=99_999)) => build.driver(version),
            ("--no-nvrtc", _) => build.without_compiler(),
            ("--without", _) => match arguments.next() {
                Some(entry) => build.without(&entry),
                None => return usage(),
            },
            _ => return usage(),
        };
    }
    println!("{}", build.dir().display());
    std::process::ExitCode::SUCCESS
}

#[cfg(target_os = "linux")]
fn usage() -> std::process::ExitCode {
    eprintln!("usage: fake-cuda-dir [DRIVER_VERSION, such as 12010] [--without ENTRY]... [--no-nvrtc]");
    std::process::ExitCode::FAILURE
}

#[cfg(not(target_os = "linux"))]
fn main() -> std::process::ExitCode {
    eprintln!("fake-cuda stands in for libcuda.so.1, which only Linux loads");
    std::process::ExitCode::FAILURE
}

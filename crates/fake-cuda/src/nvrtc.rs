//! A run-time compiler that understands the declarations of kernels and nothing of their bodies.

use crate::entry::{lock, put};
use crate::versions::ptx_version;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Mutex;

const SUCCESS: c_int = 0;
const INVALID_INPUT: c_int = 3;
const INVALID_PROGRAM: c_int = 4;
const INVALID_OPTION: c_int = 5;
const COMPILATION: c_int = 6;
const NO_LOWERED_NAMES_BEFORE_COMPILATION: c_int = 9;
const NAME_EXPRESSION_NOT_VALID: c_int = 10;
const INTERNAL_ERROR: c_int = 11;
const HANDLES: usize = 0x7A00_0000;

#[derive(Default)]
struct Program {
    source: String,
    name: String,
    expressions: Vec<String>,
    ptx: Option<CString>,
    log: CString,
    lowered: BTreeMap<String, CString>,
}

struct Programs {
    live: BTreeMap<usize, Program>,
    ever: usize,
}

static PROGRAMS: Mutex<Programs> = Mutex::new(Programs { live: BTreeMap::new(), ever: 0 });

/// One C type that a kernel may take.
struct Type {
    ptx: &'static str,
    mangled: &'static str,
    words: &'static str,
}

const fn of(words: &'static str, ptx: &'static str, mangled: &'static str) -> Type {
    Type { ptx, mangled, words }
}

const TYPES: &[Type] = &[
    of("float", ".f32", "f"),
    of("double", ".f64", "d"),
    of("int", ".u32", "i"),
    of("unsigned int", ".u32", "j"),
    of("unsigned", ".u32", "j"),
    of("short", ".u16", "s"),
    of("unsigned short", ".u16", "t"),
    of("char", ".u8", "c"),
    of("signed char", ".u8", "a"),
    of("unsigned char", ".u8", "h"),
    of("bool", ".u8", "b"),
    of("long", ".u64", "l"),
    of("unsigned long", ".u64", "m"),
    of("size_t", ".u64", "m"),
    of("long long", ".u64", "x"),
    of("unsigned long long", ".u64", "y"),
    of("void", "", "v"),
    // The fixed-width names that programs define for themselves, since there are no system headers.
    of("int8_t", ".u8", "a"),
    of("uint8_t", ".u8", "h"),
    of("int16_t", ".u16", "s"),
    of("uint16_t", ".u16", "t"),
    of("int32_t", ".u32", "i"),
    of("uint32_t", ".u32", "j"),
    of("int64_t", ".u64", "l"),
    of("uint64_t", ".u64", "m"),
];

struct Kernel {
    plain: String,
    symbol: String,
    params: Vec<&'static str>,
}

/// What went wrong, and on which line.
struct Refused {
    line: usize,
    what: String,
}

fn refused<T>(source: &str, rest: &str, what: impl Into<String>) -> Result<T, Refused> {
    let before = &source[..source.len() - rest.len()];
    Err(Refused { line: before.matches('\n').count() + 1, what: what.into() })
}

/// Comments and the contents of strings become blanks; lines stay where they are.
fn blank_comments(source: &str) -> String {
    let mut clean = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let end = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |at| at + 2),
            _ => {
                clean.push(c);
                rest = &rest[c.len_utf8()..];
                continue;
            }
        };
        clean.extend(rest[..end].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = &rest[end..];
    }
    clean
}

fn check_brackets(source: &str) -> Result<(), Refused> {
    let mut open = Vec::new();
    for (at, c) in source.char_indices() {
        let expected = match c {
            '{' | '(' | '[' => {
                open.push(match c {
                    '{' => '}',
                    '(' => ')',
                    _ => ']',
                });
                continue;
            }
            '}' | ')' | ']' => open.pop(),
            _ => continue,
        };
        match expected {
            Some(expected) if expected == c => {}
            Some(expected) => {
                return refused(source, &source[at..], format!("error: expected a \"{expected}\""))
            }
            None => return refused(source, &source[at..], "error: expected a declaration"),
        }
    }
    match open.pop() {
        Some(expected) => refused(source, "", format!("error: expected a \"{expected}\"")),
        None => Ok(()),
    }
}

fn compile(source: &str) -> Result<Vec<Kernel>, Refused> {
    let source = blank_comments(source);
    for (index, line) in source.lines().enumerate() {
        if let Some(text) = line.trim_start().strip_prefix("#error") {
            return Err(Refused {
                line: index + 1,
                what: format!("catastrophic error: #error directive:{text}"),
            });
        }
    }
    check_brackets(&source)?;
    let c_blocks = c_linkage_blocks(&source);
    let mut kernels = Vec::new();
    let mut rest = source.as_str();
    while let Some(at) = rest.find("__global__") {
        let offset = source.len() - rest.len() + at;
        let statement = rest[..at].rfind([';', '}', '{']).map_or(0, |end| end + 1);
        let plain = rest[statement..at].contains("extern \"C\"")
            || c_blocks.iter().any(|block| block.contains(&offset));
        rest = &rest[at + "__global__".len()..];
        let mut kernel = declaration(&source, rest)?;
        if plain {
            kernel.symbol.clone_from(&kernel.plain);
        }
        if !kernels.iter().any(|known: &Kernel| known.symbol == kernel.symbol) {
            kernels.push(kernel);
        }
    }
    Ok(kernels)
}

/// The ranges of `extern "C" { … }`.
fn c_linkage_blocks(source: &str) -> Vec<std::ops::Range<usize>> {
    let mut blocks = Vec::new();
    for (at, opening) in source.match_indices("extern \"C\"") {
        let body = at + opening.len();
        if !source[body..].trim_start().starts_with('{') {
            continue;
        }
        let mut depth = 0;
        for (index, c) in source[body..].char_indices() {
            depth += i32::from(c == '{') - i32::from(c == '}');
            if depth == 0 && c == '}' {
                blocks.push(body..body + index);
                break;
            }
        }
    }
    blocks
}

/// `rest` begins right after `__global__`.
fn declaration(source: &str, rest: &str) -> Result<Kernel, Refused> {
    let mut head = rest.trim_start();
    let mut returns_void = false;
    loop {
        if let Some(tail) = head.strip_prefix("void").filter(|tail| tail.starts_with(char::is_whitespace)) {
            returns_void = true;
            head = tail.trim_start();
        } else if let Some(tail) = head.strip_prefix("__launch_bounds__") {
            head = tail.split_once(')').map_or("", |(_, tail)| tail).trim_start();
        } else {
            break;
        }
    }
    if !returns_void {
        return refused(source, head, "error: a \"__global__\" function must have a void return type");
    }
    let end = head.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(head.len());
    let (name, tail) = head.split_at(end);
    let Some(list) = tail.trim_start().strip_prefix('(').and_then(|tail| tail.split_once(')')) else {
        return refused(source, head, "error: expected a \"(\"");
    };
    if name.is_empty() {
        return refused(source, head, "error: expected an identifier");
    }
    let mut params = Vec::new();
    let mut mangled = String::new();
    for text in list.0.split(',').map(str::trim).filter(|text| !text.is_empty() && *text != "void") {
        let Some((ptx, letters)) = parameter(text) else {
            let word = text.split_whitespace().find(|word| *word != "const").unwrap_or(text);
            return refused(source, tail, format!("error: identifier \"{word}\" is undefined"));
        };
        params.push(ptx);
        mangled.push_str(&letters);
    }
    if mangled.is_empty() {
        mangled.push('v');
    }
    Ok(Kernel { plain: name.into(), symbol: format!("_Z{}{name}{mangled}", name.len()), params })
}

/// PTX type and mangled letters of one parameter. Pointers that repeat a type are not abbreviated.
fn parameter(text: &str) -> Option<(&'static str, String)> {
    let stars = text.matches('*').count();
    let words: Vec<&str> = text
        .split(|c: char| c.is_whitespace() || c == '*')
        .filter(|word| !word.is_empty() && !matches!(*word, "__restrict__" | "volatile" | "struct"))
        .collect();
    let constant = words.contains(&"const");
    let words: Vec<&str> = words.into_iter().filter(|word| *word != "const").collect();
    // With a name or without one.
    let kind = [words.len(), words.len().saturating_sub(1)].iter().find_map(|length| {
        TYPES.iter().find(|kind| *length > 0 && kind.words == words[..*length].join(" "))
    })?;
    if stars > 0 {
        return Some((
            ".u64",
            format!("{}{}{}", "P".repeat(stars), if constant { "K" } else { "" }, kind.mangled),
        ));
    }
    (!kind.ptx.is_empty()).then(|| (kind.ptx, kind.mangled.to_owned()))
}

fn ptx(kernels: &[Kernel], target: &str) -> String {
    let version = ptx_version(crate::entry::runtime().config.driver_version);
    let mut text =
        format!(".version {}.{}\n.target {target}\n.address_size 64\n", version / 10, version % 10);
    for kernel in kernels {
        let params: Vec<_> = kernel
            .params
            .iter()
            .enumerate()
            .map(|(i, kind)| format!("\t.param {kind} {}_param_{i}", kernel.symbol))
            .collect();
        text.push_str(&format!(
            "\n.visible .entry {}(\n{}\n)\n{{\n\tret;\n}}\n",
            kernel.symbol,
            params.join(",\n")
        ));
    }
    text
}

/// `sm_90` of the options, or what the compiler takes by itself; the error is the option that is not understood.
fn target(options: &[String]) -> Result<String, String> {
    let mut target = "sm_75".to_owned();
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let value = match option.split_once('=') {
            Some(("--gpu-architecture" | "-arch", value)) => Some(value.to_owned()),
            None if option == "--gpu-architecture" || option == "-arch" => options.next().cloned(),
            _ if option.starts_with('-') => None,
            _ => return Err(option.clone()),
        };
        if let Some(value) = value {
            let digits = value.strip_prefix("compute_").or_else(|| value.strip_prefix("sm_")).unwrap_or("");
            if !digits.trim_end_matches('a').parse::<u32>().is_ok_and(|number| (50..=129).contains(&number)) {
                return Err(value);
            }
            target = format!("sm_{digits}");
        }
    }
    Ok(target)
}

fn with(handle: usize, act: impl FnOnce(&mut Program) -> c_int) -> c_int {
    let act = AssertUnwindSafe(|| lock(&PROGRAMS).live.get_mut(&handle).map_or(INVALID_PROGRAM, act));
    catch_unwind(act).unwrap_or(INTERNAL_ERROR)
}

/// # Safety
/// `out` is null or valid for writing.
unsafe fn give<T>(out: *mut T, value: T) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { put(out, value) }.map_or(INVALID_INPUT, |()| SUCCESS)
}

/// # Safety
/// `out` is null or has room for the text and its terminating zero.
unsafe fn give_text(out: *mut c_char, text: &CStr) -> c_int {
    if out.is_null() {
        return INVALID_INPUT;
    }
    let bytes = text.to_bytes_with_nul();
    // SAFETY: not null, so as long as the size call said, by this function's contract.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), bytes.len()) };
    SUCCESS
}

/// # Safety
/// `text` is null or a zero-terminated string.
unsafe fn read(text: *const c_char) -> Option<String> {
    // SAFETY: not null, so zero-terminated by this function's contract.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

macro_rules! compiler {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("The compiler's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As the compiler's documentation says: pointers are null or point to what it names.
        #[no_mangle]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: the caller keeps the documented contract: pointers are null or point to what is named, and buffers
            // are as long as the matching size call said.
            unsafe { $body }
        }
    )*};
}

compiler! {
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) {
        let version = crate::entry::runtime().config.driver_version as c_int;
        match give(major, version / 1000) {
            SUCCESS => give(minor, version % 1000 / 10),
            refused => refused,
        }
    }

    fn nvrtcGetNumSupportedArchs(count: *mut c_int) {
        give(count, 4)
    }

    fn nvrtcGetSupportedArchs(archs: *mut c_int) {
        if archs.is_null() {
            return INVALID_INPUT;
        }
        for (index, arch) in [75, 80, 89, 90].into_iter().enumerate() {
            archs.add(index).write(arch);
        }
        SUCCESS
    }

    fn nvrtcCreateProgram(
        program: *mut usize, source: *const c_char, name: *const c_char, _headers: c_int,
        _header_texts: *const *const c_char, _header_names: *const *const c_char,
    ) {
        let Some(source) = read(source) else { return INVALID_INPUT };
        let name = read(name).filter(|name| !name.is_empty()).unwrap_or_else(|| "default_program".into());
        let mut programs = lock(&PROGRAMS);
        programs.ever += 1;
        let handle = HANDLES + programs.ever * 0x40;
        match give(program, handle) {
            SUCCESS => {
                programs.live.insert(handle, Program { source, name, ..Program::default() });
                SUCCESS
            }
            refused => refused,
        }
    }

    fn nvrtcDestroyProgram(program: *mut usize) {
        if program.is_null() || lock(&PROGRAMS).live.remove(&program.read()).is_none() {
            return INVALID_PROGRAM;
        }
        give(program, 0)
    }

    fn nvrtcAddNameExpression(program: usize, expression: *const c_char) {
        let Some(expression) = read(expression) else { return INVALID_INPUT };
        with(program, |program| {
            program.expressions.push(expression);
            SUCCESS
        })
    }

    fn nvrtcCompileProgram(program: usize, count: c_int, options: *const *const c_char) {
        let mut list = Vec::new();
        for index in 0..count.max(0) as usize {
            match read(options.add(index).read()) {
                Some(option) => list.push(option),
                None => return INVALID_INPUT,
            }
        }
        with(program, |program| compile_program(program, &list))
    }

    fn nvrtcGetPTXSize(program: usize, size: *mut usize) {
        with(program, |program| program.ptx.as_ref().map_or(INVALID_PROGRAM, |ptx| give(size, ptx.as_bytes_with_nul().len())))
    }

    fn nvrtcGetPTX(program: usize, text: *mut c_char) {
        with(program, |program| program.ptx.as_ref().map_or(INVALID_PROGRAM, |ptx| give_text(text, ptx)))
    }

    fn nvrtcGetProgramLogSize(program: usize, size: *mut usize) {
        with(program, |program| give(size, program.log.as_bytes_with_nul().len()))
    }

    fn nvrtcGetProgramLog(program: usize, text: *mut c_char) {
        with(program, |program| give_text(text, &program.log))
    }

    fn nvrtcGetLoweredName(program: usize, expression: *const c_char, name: *mut *const c_char) {
        let Some(expression) = read(expression) else { return INVALID_INPUT };
        with(program, |program| {
            if program.ptx.is_none() {
                return NO_LOWERED_NAMES_BEFORE_COMPILATION;
            }
            match program.lowered.get(&expression) {
                Some(lowered) => give(name, lowered.as_ptr()),
                None => NAME_EXPRESSION_NOT_VALID,
            }
        })
    }
}

fn compile_program(program: &mut Program, options: &[String]) -> c_int {
    let log = |text: String| CString::new(text.replace('\0', " ")).unwrap_or_default();
    let target = match target(options) {
        Ok(target) => target,
        Err(option) => {
            program.log = log(format!(
                "nvrtc: error: invalid value for --gpu-architecture or unknown option: {option}\n"
            ));
            return INVALID_OPTION;
        }
    };
    let kernels = match compile(&program.source) {
        Ok(kernels) => kernels,
        Err(Refused { line, what }) => {
            let name = &program.name;
            program.log = log(format!(
                "{name}({line}): {what}\n\n1 error detected in the compilation of \"{name}\".\n"
            ));
            return COMPILATION;
        }
    };
    for expression in &program.expressions {
        let plain = expression.trim_start_matches('&');
        let Some(kernel) = kernels.iter().find(|kernel| kernel.plain == plain) else {
            program.log = log(format!("error: the name expression {expression} names no kernel\n"));
            return COMPILATION;
        };
        program.lowered.insert(expression.clone(), log(kernel.symbol.clone()));
    }
    program.ptx = Some(log(ptx(&kernels, &target)));
    program.log = CString::default();
    SUCCESS
}

/// The sentence of a result.
#[no_mangle]
pub extern "C" fn nvrtcGetErrorString(result: c_int) -> *const c_char {
    let text = match result {
        SUCCESS => c"NVRTC_SUCCESS",
        1 => c"NVRTC_ERROR_OUT_OF_MEMORY",
        2 => c"NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        INVALID_OPTION => c"NVRTC_ERROR_INVALID_OPTION",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        7 => c"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        8 => c"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
        NO_LOWERED_NAMES_BEFORE_COMPILATION => c"NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
        NAME_EXPRESSION_NOT_VALID => c"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        INTERNAL_ERROR => c"NVRTC_ERROR_INTERNAL_ERROR",
        _ => c"NVRTC_ERROR unknown",
    };
    text.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols(source: &str) -> Vec<(String, Vec<&'static str>)> {
        match compile(source) {
            Ok(kernels) => kernels.into_iter().map(|k| (k.symbol, k.params)).collect(),
            Err(refused) => panic!("line {}: {}", refused.line, refused.what),
        }
    }

    #[test]
    fn declarations() {
        let found = symbols(
            "extern \"C\" __global__ void fill_f32(float* p, unsigned int n, float value) { p[0] = value; }\n\
             // __global__ void commented(int a);\n\
             __global__ void __launch_bounds__(256) scale(const float *__restrict__ p, size_t n, float) { }\n\
             extern \"C\" {\n__global__ void spin(int ms) { if (ms) { } }\n}\n__global__ void nothing() {}",
        );
        assert_eq!(found[0], ("fill_f32".into(), vec![".u64", ".u32", ".f32"]));
        assert_eq!(found[1], ("_Z5scalePKfmf".into(), vec![".u64", ".u64", ".f32"]));
        assert_eq!(found[2], ("spin".into(), vec![".u32"]));
        assert_eq!(found[3], ("_Z7nothingv".into(), vec![]));
        assert_eq!(found.len(), 4);
    }

    #[test]
    fn errors_name_their_line() {
        let error = |source: &str| compile(source).err().map(|refused| (refused.line, refused.what)).unwrap();
        assert_eq!(
            error("\n\n#error stop here"),
            (3, "catastrophic error: #error directive: stop here".into())
        );
        assert_eq!(error("__global__ void k() {\n if (1) {\n}\n").1, "error: expected a \"}\"");
        assert_eq!(error("__global__ void k() {\n f(1;\n}\n"), (3, "error: expected a \")\"".into()));
        assert_eq!(error("\n__global__ void k(flaot* p) {}").1, "error: identifier \"flaot*\" is undefined");
        assert!(error("__global__ int k() {}").1.contains("void return type"));
    }

    #[test]
    fn options() {
        let of = |list: &[&str]| target(&list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["--gpu-architecture=compute_90", "-I/usr"]), Ok("sm_90".into()));
        assert_eq!(of(&["-arch", "sm_80"]), Ok("sm_80".into()));
        assert_eq!(of(&["--gpu-architecture=compute_xx"]), Err("compute_xx".into()));
        assert_eq!(of(&["what"]), Err("what".into()));
    }
}

//! A stand-in `libcuda.so.1` for tests without a GPU.
#![cfg(target_os = "linux")]
// The exported names are the driver's.
#![allow(non_snake_case)]

mod api;
mod capture;
mod codes;
mod config;
mod context;
mod control;
mod elf;
mod entry;
mod event;
mod helper;
mod kernels;
mod memory;
mod module;
mod ptx;
mod stream;
mod versions;

pub use helper::{library_dir, Build, Calls, Loaded};
pub use versions::{DEFAULT_VERSION, OLD_VERSION};

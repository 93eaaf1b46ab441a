//! The Node-API binding of `unimalloc`.
//!
//! Thin and private: plain functions over numbers and buffers, no allocator logic and no argument checks that the
//! TypeScript face makes already. What lives here is what only native code can do: keep the memory behind an
//! `ArrayBuffer` alive until its last holder lets go, and wait for the GPU off the event loop.
//!
//! Addresses cross the boundary as doubles: every user-space address is below 2^53, and a double costs half of what
//! a `BigInt` does.

// Built as a test, which only linters do, `#[napi]` registers nothing.
#![cfg_attr(test, allow(dead_code))]
#![deny(clippy::all)]

mod account;
mod alloc;
mod block;
mod buffer;
mod collector;
mod contract;
mod cuda;
mod dispatch;
mod failure;
mod holds;
mod hot;
mod magazine;
mod out;
mod share;
mod table;
mod thread_allocator;
mod thread_end;
mod thread_number;

use napi_derive::module_init;

/// Keeps the addon loaded for the rest of the process: an addon that only a worker loaded would be unloaded with it,
/// while thread-exit code of that worker still points into it.
#[module_init]
fn init() {
    napi::bindgen_prelude::retain_current_module_for_unload_safety();
}

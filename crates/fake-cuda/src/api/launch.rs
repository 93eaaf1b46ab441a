//! Kernel launches.

use crate::codes::*;
use crate::context::Context;
use crate::entry::entries;
use crate::kernels::Launch;
use crate::module::{self, Function};
use crate::stream;
use std::ffi::c_void;
use std::sync::atomic::Ordering::*;
use std::sync::Arc;

const END: usize = 0;
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;

/// Copies the parameters out of the caller's arrays, as a launch does before it returns.
///
/// # Safety
/// `params` is null or has one pointer a parameter, each to that many bytes; `extra` is null or a list that ends.
unsafe fn parameters(
    function: &Function,
    params: *const *const u8,
    extra: *const *const c_void,
) -> Outcome<Vec<u8>> {
    let mut bytes = vec![0; function.entry.param_bytes()];
    if !params.is_null() {
        if !extra.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        for (index, param) in function.entry.params.iter().enumerate() {
            // SAFETY: by this function's contract.
            unsafe {
                let from = params.add(index).read();
                if from.is_null() {
                    return Err(ERROR_INVALID_VALUE);
                }
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr().add(param.offset), param.size);
            }
        }
        return Ok(bytes);
    }
    if extra.is_null() {
        return if bytes.is_empty() { Ok(bytes) } else { Err(ERROR_INVALID_VALUE) };
    }
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0usize);
    let mut at = extra;
    loop {
        // SAFETY: the list ends with END by this function's contract, and every other key has a value after it.
        unsafe {
            match at.read() as usize {
                END => break,
                BUFFER_POINTER => buffer = at.add(1).read().cast(),
                BUFFER_SIZE => size = at.add(1).read().cast::<usize>().read(),
                _ => return Err(ERROR_INVALID_VALUE),
            }
            at = at.add(2);
        }
    }
    if buffer.is_null() || size < bytes.len() {
        return Err(ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's buffer has `size` bytes, at least as many as are copied.
    unsafe { std::ptr::copy_nonoverlapping(buffer, bytes.as_mut_ptr(), bytes.len()) };
    Ok(bytes)
}

/// # Safety
/// As for `parameters`.
#[allow(clippy::too_many_arguments, reason = "they are the driver's")]
unsafe fn launch(
    current: &Outcome<Arc<Context>>,
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    params: *const *const u8,
    extra: *const *const c_void,
) -> Outcome {
    let function = module::resolve(function)?;
    let stream = stream::resolve(current, stream)?;
    if function.context != stream.context()?.handle {
        return Err(ERROR_INVALID_HANDLE);
    }
    let threads = block.iter().map(|n| u64::from(*n)).product::<u64>();
    let outside = grid.contains(&0)
        || threads == 0
        || grid[0] > i32::MAX as u32
        || grid[1..].iter().any(|n| *n > 65_535)
        || block[0] > 1024
        || block[1] > 1024
        || block[2] > 64
        || threads > 1024
        || shared > function.dynamic_shared.load(Relaxed);
    if outside {
        return Err(ERROR_INVALID_VALUE);
    }
    if threads > u64::from(function.entry.max_threads) {
        return Err(ERROR_LAUNCH_OUT_OF_RESOURCES);
    }
    let blocks = grid.iter().map(|n| u64::from(*n)).product::<u64>();
    // SAFETY: by this function's contract.
    let bytes = unsafe { parameters(&function, params, extra) }?;
    let launch = Launch::new(&function.entry, bytes, blocks.saturating_mul(threads))?;
    stream::run(&stream, move || launch.run())
}

entries! {
    fn cuLaunchKernel[Handle current](
        function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: usize, params: *const *const u8, extra: *const *const c_void,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch(&current, function, grid, block, shared, stream, params, extra)
    }
}

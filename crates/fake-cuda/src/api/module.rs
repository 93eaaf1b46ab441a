//! Modules, functions and what can be asked of them.

use crate::capture;
use crate::codes::*;
use crate::context::Context;
use crate::entry::{entries, put, put_if_wanted};
use crate::module;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::atomic::Ordering::*;

const INFO_LOG_BUFFER: c_int = 3;
const INFO_LOG_SIZE: c_int = 4;
const ERROR_LOG_BUFFER: c_int = 5;
const ERROR_LOG_SIZE: c_int = 6;
const MULTIPROCESSORS: c_int = 132;
const THREADS_PER_MULTIPROCESSOR: c_int = 2048;

/// Where the compiler's log goes: the caller's buffer and the option slot that holds its size.
struct Log {
    buffer: *mut u8,
    size: *mut *mut c_void,
}

impl Log {
    /// # Safety
    /// Both arrays are null or `count` long, and a log buffer is as long as its size option says.
    unsafe fn find(
        count: u32,
        options: *const c_int,
        values: *mut *mut c_void,
        buffer: c_int,
        size: c_int,
    ) -> Self {
        let mut log = Self { buffer: std::ptr::null_mut(), size: std::ptr::null_mut() };
        if options.is_null() || values.is_null() {
            return log;
        }
        for index in 0..count as usize {
            // SAFETY: inside both arrays by this function's contract.
            let (option, slot) = unsafe { (options.add(index).read(), values.add(index)) };
            if option == buffer {
                // SAFETY: as above.
                log.buffer = unsafe { slot.read() }.cast();
            } else if option == size {
                log.size = slot;
            }
        }
        log
    }

    /// # Safety
    /// As for `find`.
    unsafe fn write(&self, text: &str) {
        if self.buffer.is_null() || self.size.is_null() {
            return;
        }
        // SAFETY: the slot is inside the caller's array; it holds the buffer's size, and the buffer is that long.
        unsafe {
            let room = self.size.read() as usize as u32 as usize;
            let kept = text.len().min(room.saturating_sub(1));
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.buffer, kept);
            if room > 0 {
                self.buffer.add(kept).write(0);
            }
            self.size.write(kept as *mut c_void);
        }
    }
}

/// # Safety
/// `image` is null or a zero-terminated string; `error` is as `Log::find` made it.
unsafe fn load(context: &Context, out: *mut usize, image: *const c_char, error: Option<&Log>) -> Outcome {
    if out.is_null() || image.is_null() {
        return Err(ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so zero-terminated by this function's contract.
    let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
    let (log, result) = match module::load(context, &text) {
        Ok(handle) => (String::new(), Ok(handle)),
        Err(rejected) => (rejected.log, Err(rejected.code)),
    };
    if let Some(error) = error {
        // SAFETY: by this function's contract.
        unsafe { error.write(&log) };
    }
    // SAFETY: not null, checked above.
    unsafe { put(out, result?) }
}

fn blocks_per_multiprocessor(function: usize, block: c_int, shared: usize) -> Outcome<c_int> {
    let function = module::resolve(function)?;
    if block <= 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    if block as u32 > function.entry.max_threads || shared > 227 << 10 {
        return Ok(0);
    }
    let by_threads = THREADS_PER_MULTIPROCESSOR / ((block + 31) / 32 * 32);
    let by_memory = (228usize << 10).checked_div(shared).map_or(32, |n| n.min(32) as c_int);
    Ok(by_threads.min(by_memory).min(32))
}

entries! {
    fn cuModuleLoadData[Ctx context](out: *mut usize, image: *const c_char) {
        load(&context, out, image, None)
    }

    fn cuModuleLoadDataEx[Ctx context](
        out: *mut usize, image: *const c_char, count: u32, options: *const c_int, values: *mut *mut c_void,
    ) {
        if count > 0 && (options.is_null() || values.is_null()) {
            return Err(ERROR_INVALID_VALUE);
        }
        let info = Log::find(count, options, values, INFO_LOG_BUFFER, INFO_LOG_SIZE);
        info.write("");
        let error = Log::find(count, options, values, ERROR_LOG_BUFFER, ERROR_LOG_SIZE);
        load(&context, out, image, Some(&error))
    }

    fn cuModuleUnload[Init _r](handle: usize) {
        capture::forbid_unsafe_call()?;
        module::unload(handle)
    }

    fn cuModuleGetFunction[Init _r](out: *mut usize, handle: usize, name: *const c_char) {
        if out.is_null() || name.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        let name = CStr::from_ptr(name).to_str().map_err(|_| ERROR_NOT_FOUND)?;
        put(out, module::function(handle, name)?)
    }

    fn cuModuleGetFunctionCount[Init _r](count: *mut u32, handle: usize) {
        put(count, module::function_count(handle)? as u32)
    }

    fn cuModuleGetGlobal_v2[Init _r](_address: *mut usize, _bytes: *mut usize, _handle: usize, _name: *const c_char) {
        Err(ERROR_NOT_FOUND)
    }

    fn cuFuncGetAttribute[Init _r](value: *mut c_int, which: c_int, handle: usize) {
        put(value, module::resolve(handle)?.attribute(which).ok_or(ERROR_INVALID_VALUE)?)
    }

    fn cuFuncSetAttribute[Init _r](handle: usize, which: c_int, value: c_int) {
        let function = module::resolve(handle)?;
        match which {
            8 if (0..=227 << 10).contains(&value) => function.dynamic_shared.store(value as u32, Relaxed),
            9 if (-1..=100).contains(&value) => {}
            _ => return Err(ERROR_INVALID_VALUE),
        }
        Ok(())
    }

    fn cuFuncSetCacheConfig[Init _r](handle: usize, _preference: c_int) {
        module::resolve(handle).map(drop)
    }

    fn cuFuncGetModule[Init _r](out: *mut usize, handle: usize) {
        put(out, module::resolve(handle)?.module)
    }

    fn cuFuncGetParamInfo[Init _r](handle: usize, index: usize, offset: *mut usize, size: *mut usize) {
        let function = module::resolve(handle)?;
        let param = function.entry.params.get(index).ok_or(ERROR_INVALID_VALUE)?;
        put(offset, param.offset)?;
        put_if_wanted(size, param.size);
        Ok(())
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor[Init _r](out: *mut c_int, handle: usize, block: c_int, shared: usize) {
        put(out, blocks_per_multiprocessor(handle, block, shared)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags[Init _r](
        out: *mut c_int, handle: usize, block: c_int, shared: usize, _flags: u32,
    ) {
        put(out, blocks_per_multiprocessor(handle, block, shared)?)
    }

    fn cuOccupancyMaxPotentialBlockSize[Init _r](
        min_grid: *mut c_int, block: *mut c_int, handle: usize, shared_of: Option<unsafe extern "C" fn(c_int) -> usize>,
        shared: usize, limit: c_int,
    ) {
        potential(min_grid, block, handle, shared_of, shared, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags[Init _r](
        min_grid: *mut c_int, block: *mut c_int, handle: usize, shared_of: Option<unsafe extern "C" fn(c_int) -> usize>,
        shared: usize, limit: c_int, _flags: u32,
    ) {
        potential(min_grid, block, handle, shared_of, shared, limit)
    }
}

unsafe fn potential(
    min_grid: *mut c_int,
    block: *mut c_int,
    handle: usize,
    shared_of: Option<unsafe extern "C" fn(c_int) -> usize>,
    shared: usize,
    limit: c_int,
) -> Outcome {
    let function = module::resolve(handle)?;
    let most = match limit {
        ..0 => return Err(ERROR_INVALID_VALUE),
        0 => 1024,
        some => some.min(1024),
    };
    let best = most.min(function.entry.max_threads as c_int);
    // SAFETY: the caller's function takes a block size and gives bytes of shared memory.
    let shared = shared_of.map_or(shared, |of| unsafe { of(best) });
    let blocks = blocks_per_multiprocessor(handle, best, shared)?.max(1);
    // SAFETY: the entry point's contract: null or valid for writing.
    unsafe {
        put(min_grid, blocks * MULTIPROCESSORS)?;
        put(block, best)
    }
}

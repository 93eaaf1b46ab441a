//! Copies and fills.

use crate::codes::*;
use crate::context::Context;
use crate::entry::entries;
use crate::memory::{keep_mapped, memory};
use crate::stream;
use std::sync::Arc;

/// Where work finds a range: through the device's view, or as it is if it is the program's own memory.
fn located(address: usize, bytes: usize) -> Outcome<usize> {
    let memory = memory();
    match memory.find(address) {
        Some(_) => memory.device_view(address, bytes).ok_or(ERROR_INVALID_VALUE),
        None if address == 0 => Err(ERROR_INVALID_VALUE),
        None => Ok(address),
    }
}

fn known(address: usize) -> bool {
    memory().find(address).is_some()
}

fn copy(
    context: &Outcome<Arc<Context>>,
    to: usize,
    from: usize,
    bytes: usize,
    handle: usize,
    wait: bool,
) -> Outcome {
    let stream = stream::resolve(context, handle)?;
    if bytes == 0 {
        return Ok(());
    }
    located(to, bytes)?;
    located(from, bytes)?;
    stream::run(&stream, move || {
        let _mapped = keep_mapped();
        let (to, from) = (located(to, bytes)?, located(from, bytes)?);
        // SAFETY: a range that the driver knows was just found whole and stays mapped while `_mapped` lives; any other
        // one is the program's own, which promises that it is valid.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    })?;
    // Memory that is not the driver's may be gone once this returns, so the copy ends first, as the real one's does.
    if wait || !known(to) || !known(from) {
        crate::capture::forbid_on(&stream)?;
        return stream.synchronize();
    }
    Ok(())
}

fn fill(
    context: &Outcome<Arc<Context>>,
    to: usize,
    value: &[u8],
    count: usize,
    handle: usize,
    wait: bool,
) -> Outcome {
    let stream = stream::resolve(context, handle)?;
    let bytes = count.checked_mul(value.len()).ok_or(ERROR_INVALID_VALUE)?;
    if bytes == 0 {
        return Ok(());
    }
    if !to.is_multiple_of(value.len()) || memory().find_range(to, bytes).is_none() {
        return Err(ERROR_INVALID_VALUE);
    }
    let value = value.to_vec();
    stream::run(&stream, move || {
        let _mapped = keep_mapped();
        let view = memory().device_view(to, bytes).ok_or(ERROR_ILLEGAL_ADDRESS)?;
        for (index, byte) in value.iter().enumerate().filter(|_| value.len() > 1) {
            for element in 0..count {
                // SAFETY: `index` lies inside the range found above, which `_mapped` keeps mapped.
                unsafe { (view as *mut u8).add(element * value.len() + index).write(*byte) };
            }
        }
        if value.len() == 1 {
            // SAFETY: the whole range was found above and stays mapped while `_mapped` lives.
            unsafe { std::ptr::write_bytes(view as *mut u8, value[0], bytes) };
        }
        Ok(())
    })?;
    if wait {
        return stream.synchronize();
    }
    Ok(())
}

entries! {
    fn cuMemcpy[Handle context](to: usize, from: usize, bytes: usize) {
        copy(&context, to, from, bytes, 0, true)
    }
    fn cuMemcpyAsync[Handle context](to: usize, from: usize, bytes: usize, stream: usize) {
        copy(&context, to, from, bytes, stream, false)
    }
    fn cuMemcpyHtoD_v2[Handle context](to: usize, from: usize, bytes: usize) {
        copy(&context, to, from, bytes, 0, true)
    }
    fn cuMemcpyDtoH_v2[Handle context](to: usize, from: usize, bytes: usize) {
        copy(&context, to, from, bytes, 0, true)
    }
    fn cuMemcpyDtoD_v2[Handle context](to: usize, from: usize, bytes: usize) {
        copy(&context, to, from, bytes, 0, true)
    }
    fn cuMemcpyHtoDAsync_v2[Handle context](to: usize, from: usize, bytes: usize, stream: usize) {
        copy(&context, to, from, bytes, stream, false)
    }
    fn cuMemcpyDtoHAsync_v2[Handle context](to: usize, from: usize, bytes: usize, stream: usize) {
        copy(&context, to, from, bytes, stream, false)
    }
    fn cuMemcpyDtoDAsync_v2[Handle context](to: usize, from: usize, bytes: usize, stream: usize) {
        copy(&context, to, from, bytes, stream, false)
    }
    fn cuMemsetD8_v2[Handle context](to: usize, value: u8, count: usize) {
        fill(&context, to, &[value], count, 0, true)
    }
    fn cuMemsetD8Async[Handle context](to: usize, value: u8, count: usize, stream: usize) {
        fill(&context, to, &[value], count, stream, false)
    }
    fn cuMemsetD16_v2[Handle context](to: usize, value: u16, count: usize) {
        fill(&context, to, &value.to_ne_bytes(), count, 0, true)
    }
    fn cuMemsetD16Async[Handle context](to: usize, value: u16, count: usize, stream: usize) {
        fill(&context, to, &value.to_ne_bytes(), count, stream, false)
    }
    fn cuMemsetD32_v2[Handle context](to: usize, value: u32, count: usize) {
        fill(&context, to, &value.to_ne_bytes(), count, 0, true)
    }
    fn cuMemsetD32Async[Handle context](to: usize, value: u32, count: usize, stream: usize) {
        fill(&context, to, &value.to_ne_bytes(), count, stream, false)
    }
}

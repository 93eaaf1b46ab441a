//! Contexts and the context stack of the calling thread.

use crate::codes::*;
use crate::context;
use crate::entry::{entries, put, put_if_wanted};
use crate::{capture, stream};
use std::ffi::c_int;

entries! {
    fn cuCtxCreate_v2[Init runtime](created: *mut usize, flags: u32, device: c_int) {
        if created.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        if !(0..runtime.config.devices).contains(&device) {
            return Err(ERROR_INVALID_DEVICE);
        }
        put(created, context::create_current(device, flags))
    }

    fn cuCtxDestroy_v2[Init _r](handle: usize) {
        context::destroy_created(handle)
    }

    fn cuCtxPushCurrent_v2[Init _r](handle: usize) {
        context::push(handle)
    }

    fn cuCtxPopCurrent_v2[Init _r](popped: *mut usize) {
        let handle = context::pop()?;
        put_if_wanted(popped, handle);
        Ok(())
    }

    fn cuCtxSetCurrent[Init _r](handle: usize) {
        context::set(handle)
    }

    fn cuCtxGetCurrent[Init _r](handle: *mut usize) {
        put(handle, context::current_handle())
    }

    fn cuCtxGetDevice[Init _r](device: *mut c_int) {
        put(device, context::current()?.device)
    }

    fn cuCtxGetFlags[Init _r](flags: *mut u32) {
        put(flags, context::current()?.flags)
    }

    fn cuCtxGetId[Init _r](handle: usize, id: *mut u64) {
        let found = if handle == 0 { context::current()? } else { context::find(handle).ok_or(ERROR_CONTEXT_IS_DESTROYED)? };
        put(id, found.id)
    }

    fn cuCtxGetApiVersion[Init _r](handle: usize, version: *mut u32) {
        if handle == 0 { context::current()? } else { context::find(handle).ok_or(ERROR_INVALID_CONTEXT)? };
        put(version, 3020)
    }

    fn cuCtxSetFlags[Ctx _c](_flags: u32) {
        Ok(())
    }

    fn cuCtxGetLimit[Ctx _c](value: *mut usize, limit: c_int) {
        if !(0..8).contains(&limit) {
            return Err(ERROR_INVALID_VALUE);
        }
        put(value, [1024, 1 << 20, 8 << 20, 0, 0, 128, 0, 0][limit as usize])
    }

    fn cuCtxSetLimit[Ctx _c](limit: c_int, _value: usize) {
        if (0..8).contains(&limit) { Ok(()) } else { Err(ERROR_INVALID_VALUE) }
    }

    fn cuCtxGetStreamPriorityRange[Ctx _c](least: *mut c_int, greatest: *mut c_int) {
        put_if_wanted(least, 0);
        put_if_wanted(greatest, -5);
        Ok(())
    }

    fn cuCtxSynchronize[Ctx context]() {
        capture::forbid_in(context.handle)?;
        let done = context.synchronize();
        stream::settle();
        done
    }
}

//! Allocation and release.

use crate::codes::*;
use crate::context::{self, Context};
use crate::entry::{entries, put};
use crate::memory::{self, Kind};
use crate::{capture, stream};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

const ATTACH_GLOBAL: u32 = 1;
const ATTACH_HOST: u32 = 2;
const ATTACH_SINGLE: u32 = 4;

/// The context of the allocation that starts exactly at `address`.
fn owner(address: usize, accepts: impl Fn(Kind) -> bool) -> Outcome<Arc<Context>> {
    let memory = memory::memory();
    let found = memory.find(address).filter(|found| found.address == address && accepts(found.kind));
    let handle = found.ok_or(ERROR_INVALID_VALUE)?.context;
    context::find(handle).ok_or(ERROR_CONTEXT_IS_DESTROYED)
}

entries! {
    fn cuMemAllocManaged[Ctx context](out: *mut usize, bytes: usize, flags: u32) {
        if out.is_null() || !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) {
            return Err(ERROR_INVALID_VALUE);
        }
        capture::forbid_unsafe_call()?;
        if super::device::attribute(crate::entry::runtime(), 83, context.device) == Some(0) {
            return Err(ERROR_NOT_SUPPORTED);
        }
        put(out, memory::allocate(&context, bytes, Kind::Managed { host: flags == ATTACH_HOST })?)
    }

    fn cuMemAlloc_v2[Ctx context](out: *mut usize, bytes: usize) {
        if out.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        capture::forbid_unsafe_call()?;
        put(out, memory::allocate(&context, bytes, Kind::Device)?)
    }

    // It needs no current context: the address says whose it is.
    fn cuMemFree_v2[Init _r](address: usize) {
        match context::current() {
            Ok(context) => context.check_lost()?,
            Err(ERROR_INVALID_CONTEXT) => {}
            Err(destroyed) => return Err(destroyed),
        }
        capture::forbid_unsafe_call()?;
        if address == 0 {
            return Ok(());
        }
        let context = owner(address, |kind| kind != Kind::Pinned)?;
        context.check_lost()?;
        stream::synchronize_device(context.device);
        context.check_lost()?;
        memory::free(address, |kind| kind != Kind::Pinned)
    }

    // Version 1, with 32-bit handles: it knows no managed pointer, whatever the context.
    fn cuMemFree[Init _r](_address: u32) {
        Err(ERROR_INVALID_CONTEXT)
    }

    fn cuMemHostAlloc[Ctx context](out: *mut usize, bytes: usize, flags: u32) {
        if out.is_null() || flags > 7 {
            return Err(ERROR_INVALID_VALUE);
        }
        capture::forbid_unsafe_call()?;
        put(out, memory::allocate(&context, bytes, Kind::Pinned)?)
    }

    fn cuMemAllocHost_v2[Ctx context](out: *mut usize, bytes: usize) {
        if out.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        capture::forbid_unsafe_call()?;
        put(out, memory::allocate(&context, bytes, Kind::Pinned)?)
    }

    fn cuMemFreeHost[Init _r](address: usize) {
        capture::forbid_unsafe_call()?;
        let context = owner(address, |kind| kind == Kind::Pinned)?;
        context.check_lost()?;
        stream::synchronize_device(context.device);
        memory::free(address, |kind| kind == Kind::Pinned)
    }

    fn cuMemHostGetDevicePointer_v2[Ctx _c](out: *mut usize, address: usize, flags: u32) {
        if flags != 0 || memory::memory().find(address).is_none_or(|found| found.kind != Kind::Pinned) {
            return Err(ERROR_INVALID_VALUE);
        }
        put(out, address)
    }

    fn cuMemHostGetFlags[Ctx _c](flags: *mut u32, address: usize) {
        if memory::memory().find(address).is_none_or(|found| found.kind != Kind::Pinned) {
            return Err(ERROR_INVALID_VALUE);
        }
        put(flags, 3)
    }

    fn cuMemGetAddressRange_v2[Ctx _c](base: *mut usize, bytes: *mut usize, address: usize) {
        let memory = memory::memory();
        let found = memory.find(address).ok_or(ERROR_NOT_FOUND)?;
        crate::entry::put_if_wanted(base, found.address);
        crate::entry::put_if_wanted(bytes, found.bytes);
        Ok(())
    }

    fn cuStreamAttachMemAsync[Handle context](stream: usize, address: usize, _bytes: usize, flags: u32) {
        let stream = stream::resolve(&context, stream)?;
        if !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST | ATTACH_SINGLE) {
            return Err(ERROR_INVALID_VALUE);
        }
        if memory::memory().find(address).is_none_or(|found| !matches!(found.kind, Kind::Managed { .. })) {
            return Err(ERROR_INVALID_VALUE);
        }
        stream::run(&stream, move || {
            memory::attach(address, flags == ATTACH_HOST);
            Ok(())
        })
    }

    fn cuMemHostRegister_v2[Ctx _c](_address: *mut c_void, _bytes: usize, _flags: u32) {
        Err(ERROR_NOT_SUPPORTED)
    }

    fn cuMemHostUnregister[Ctx _c](_address: *mut c_void) {
        Err(ERROR_NOT_SUPPORTED)
    }

    fn cuDeviceGetDefaultMemPool[Init _r](_pool: *mut usize, _device: c_int) {
        Err(ERROR_NOT_SUPPORTED)
    }

    fn cuMemAllocAsync[Ctx _c](_out: *mut usize, _bytes: usize, _stream: usize) {
        Err(ERROR_NOT_SUPPORTED)
    }

    fn cuMemFreeAsync[Ctx _c](_address: usize, _stream: usize) {
        Err(ERROR_NOT_SUPPORTED)
    }
}

//! CUDA unified ("managed") memory.

use super::MemoryBackend;
use crate::error::{set_last_error, AllocError};

/// CUDA unified memory: one address that the CPU and the GPU both use.
pub struct CudaUnifiedBackend;

/// Whether unified memory can be had here. Creates no CUDA context.
pub fn is_cuda_available() -> bool {
    false
}

// SAFETY: no region is handed out.
unsafe impl MemoryBackend for CudaUnifiedBackend {
    unsafe fn allocate(_size: usize) -> *mut u8 {
        set_last_error(AllocError::NoDriver);
        std::ptr::null_mut()
    }
    unsafe fn deallocate(_ptr: *mut u8, _size: usize) -> bool {
        set_last_error(AllocError::NotRegistered);
        false
    }
    unsafe fn page_reset(_ptr: *mut u8, _size: usize) -> bool {
        set_last_error(AllocError::Unsupported);
        false
    }
    unsafe fn make_guard(_ptr: *mut u8, _size: usize) -> bool {
        set_last_error(AllocError::Unsupported);
        false
    }
    unsafe fn decommit(_ptr: *mut u8, _size: usize) -> bool {
        set_last_error(AllocError::Unsupported);
        false
    }
}

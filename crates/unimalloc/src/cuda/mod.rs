//! CUDA devices, streams, events, modules and kernels: what makes unified memory usable from Rust.

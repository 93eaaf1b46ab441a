//! The exported entry points, one file a subject.

pub mod context;
pub mod device;
pub mod event;
pub mod graph;
pub mod init;
pub mod launch;
pub mod memory;
pub mod module;
pub mod pointer;
pub mod prefetch;
pub mod stream;
pub mod transfer;

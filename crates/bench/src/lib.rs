//! Benchmarks of unimalloc against its peers.
//!
//! A [`Peer`](peer::Peer) is an allocator, a [`Workload`](workload::Workload) a program that allocates. Every workload is
//! written once and compiled for each peer; nothing replaces the global allocator, so all peers run in one process, in
//! turns, and a ratio compares runs that were milliseconds apart.

#[cfg(feature = "compare")]
pub mod clock;
#[cfg(feature = "compare")]
pub mod compare;
pub mod machine;
#[cfg(feature = "compare")]
pub mod peer;
pub mod random;
#[cfg(feature = "compare")]
pub mod report;
#[cfg(feature = "compare")]
pub mod resident;
#[cfg(feature = "compare")]
pub mod workload;

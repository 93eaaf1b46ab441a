//! Benchmarks of unimalloc against its peers.
//!
//! A [`Peer`](peer::Peer) is an allocator, a [`Workload`](workload::Workload) a program that allocates. Every workload is
//! written once and compiled for each peer; nothing replaces the global allocator, so all peers run in one process, in
//! turns, and a ratio compares runs that were milliseconds apart.

pub mod compare;
pub mod machine;
pub mod peer;
pub mod random;
pub mod report;
pub mod resident;
pub mod workload;

//! Benchmarks of unimalloc against its peers.

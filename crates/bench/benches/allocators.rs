//! `cargo bench -p unimalloc-bench [--features peers] [-- NAME]`: every workload with every peer, by criterion.
//!
//! Criterion runs the peers one after the other; for ratios within one round use `unimalloc-bench compare`.

use std::time::Duration;

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use unimalloc_bench::for_each_peer;
use unimalloc_bench::peer::Peer;
use unimalloc_bench::workload::Workload;

/// A run of a workload takes milliseconds at scale 1; criterion repeats it as often as it likes.
const SCALE: f64 = 0.1;

fn all(criterion: &mut Criterion) {
    for workload in Workload::all() {
        let mut group = criterion.benchmark_group(workload.name());
        group
            .sample_size(20)
            .warm_up_time(Duration::from_millis(200))
            .measurement_time(Duration::from_secs(1));
        macro_rules! bench {
            ($peer:ty) => {
                let operations = workload.run::<$peer>(SCALE).operations;
                group.throughput(Throughput::Elements(operations));
                group.bench_function(<$peer as Peer>::NAME, |bencher| {
                    bencher.iter_custom(|times| (0..times).map(|_| workload.run::<$peer>(SCALE).time).sum());
                });
            };
        }
        for_each_peer!(bench);
        group.finish();
    }
}

criterion_group!(benches, all);
criterion_main!(benches);

//! Timing: medians over rounds, and rounds of several peers in turns.

use std::time::{Duration, Instant};

pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Nanoseconds of one call of `work`, as the median of rounds that each take about `round`; for calls that are cheap and
/// alike.
pub fn nanoseconds(round: Duration, mut work: impl FnMut()) -> f64 {
    const ROUNDS: usize = 9;
    let mut calls = 1_u32;
    loop {
        let start = Instant::now();
        (0..calls).for_each(|_| work());
        let took = start.elapsed();
        if took * 3 >= round || calls > 1 << 28 {
            let scale = round.as_secs_f64() / took.as_secs_f64().max(1e-9);
            calls = ((f64::from(calls) * scale) as u32).max(1);
            break;
        }
        calls *= 4;
    }
    let mut rounds: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| work());
            start.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
        })
        .collect();
    median(&mut rounds)
}

/// Microseconds that `timed` takes, as the median of `rounds`; `prepare` comes before each and is not counted, and what it
/// answers is passed on.
pub fn microseconds<T>(rounds: usize, mut prepare: impl FnMut() -> T, mut timed: impl FnMut(T)) -> f64 {
    let mut times: Vec<_> = (0..rounds)
        .map(|_| {
            let prepared = prepare();
            let start = Instant::now();
            timed(prepared);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    median(&mut times)
}

/// Microseconds of each of several pieces of work that are run in turns, so that all see the same clocks; medians.
pub fn in_turns(rounds: usize, works: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let mut times = vec![Vec::with_capacity(rounds); works.len()];
    for _ in 0..rounds {
        for (work, times) in works.iter_mut().zip(&mut times) {
            let start = Instant::now();
            work();
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    times.iter_mut().map(|times| median(times)).collect()
}

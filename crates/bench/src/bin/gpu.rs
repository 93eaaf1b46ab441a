//! `gpu`: what managed memory costs on a GPU, against the driver and the pools of others.

fn main() {}

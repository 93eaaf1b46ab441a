//! Sequences of public calls, against the model of the tests, with everything recounted after each.
#![no_main]

#[path = "../../tests/common"]
mod common {
    pub mod faulty;
    pub mod model;
}

use common::faulty::faulty_backend;
use common::model::{decode, World};
use libfuzzer_sys::fuzz_target;

faulty_backend!(Small, 2 << 20);

fuzz_target!(|bytes: &[u8]| {
    let mut world = World::<Small>::new(Small::faults(), 3, false);
    for op in decode(bytes).iter().take(200) {
        world.step(op);
    }
    world.finish();
});

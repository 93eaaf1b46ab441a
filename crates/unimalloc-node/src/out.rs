//! Results that go back through an array of the caller's: no object is made for them.

use napi::bindgen_prelude::Float64ArraySlice;

/// Writes as many of the values as there is room for, from `from` on.
pub fn write(out: &mut Float64ArraySlice<'_>, from: usize, values: &[f64]) {
    // SAFETY: the array is the face's own, on this thread, and no JavaScript runs during the borrow; a detached one has no elements.
    let room = unsafe { out.as_mut() };
    for (slot, value) in room.iter_mut().skip(from).zip(values) {
        *slot = *value;
    }
}

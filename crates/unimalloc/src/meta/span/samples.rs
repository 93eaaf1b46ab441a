//! Spans for tests, by themselves and under the model checker.

use std::ptr::NonNull;

use super::{Shape, Span, NO_SEGMENT};
use crate::meta::geometry::{class_of, GRANULE, MAX_ALIGN};
use crate::meta::inbox::Inbox;
use crate::policy::Policy;
use crate::sync::AtomicU16;

/// What the keeper of a sample calls it in its inbox.
pub(crate) const INDEX: u32 = 3;

/// A span of one granule and `capacity` blocks, all of them handed out, and the inbox of its keeper, heap 1.
pub(crate) fn full_span(capacity: usize, policy: Policy) -> (&'static Span, &'static Inbox) {
    let coded = policy.encoded();
    let block = GRANULE / capacity.next_power_of_two();
    let slots: Vec<_> = (0..capacity << u32::from(coded)).map(|_| AtomicU16::new(0)).collect();
    let span: &'static Span = Box::leak(Box::new(Span::new(slots.leak())));
    span.shape(Shape {
        base: MAX_ALIGN,
        granules: 1,
        block,
        capacity,
        class: class_of(block) as u16,
        lane: policy as u8,
        group: 0,
        coded,
        key: 0,
        segment: NO_SEGMENT,
        home: 0,
    });
    let inbox: &'static Inbox = Box::leak(Box::new(Inbox::new()));
    inbox.reserve(INDEX);
    span.adopt(1, Some(NonNull::dangling()), 0, inbox, INDEX);
    for _ in 0..capacity {
        let index = span.pop().unwrap().unwrap();
        span.set_live(index, 0);
    }
    (span, inbox)
}

/// Takes the messages out of an inbox.
pub(crate) fn told(inbox: &Inbox) -> Vec<u32> {
    let mut told = Vec::new();
    inbox.take_told(|index| told.push(index));
    told
}

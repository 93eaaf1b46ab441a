//! Sizes: granules, size classes, span lengths. Pure arithmetic.

/// Segments are cut into granules; spans are runs of them.
pub(crate) const GRANULE: usize = 64 << 10;
pub(crate) const GRANULE_SHIFT: u32 = GRANULE.trailing_zeros();

/// The largest segment, in granules.
pub(crate) const MAX_GRANULES: usize = (32 << 20) / GRANULE;

/// The smallest block and the smallest alignment.
pub(crate) const MIN_BLOCK: usize = 16;

/// The largest block that shares a span with others.
pub(crate) const SHARED_MAX: usize = 512 << 10;

/// The largest block cut from a segment; larger ones get a backend call of their own.
pub(crate) const LARGE_MAX: usize = 8 << 20;

/// The largest alignment honoured, and what huge blocks are rounded up to.
pub(crate) const MAX_ALIGN: usize = 2 << 20;

/// Size classes: 16 to 128 by 16, then eight to a doubling up to [`LARGE_MAX`].
pub(crate) const CLASSES: usize = class_of(LARGE_MAX) + 1;

/// The most blocks a span can hold.
pub(crate) const MAX_BLOCKS: usize = GRANULE / MIN_BLOCK;

/// The smallest class that holds `size` bytes, for `1 <= size`.
///
/// With `s = size - 1` and `e = max(7, floor(log2 s))`, the top four bits of `s` count the class within its doubling:
/// `class = (s >> (e - 3)) + 8 * (e - 7)`. Sizes up to 128 share the step of the doubling above them (16), so no
/// special case is needed.
#[inline(always)]
pub(crate) const fn class_of(size: usize) -> usize {
    let s = size.wrapping_sub(1); // of 0: a class beyond all others
    let e = (s | 128).leading_zeros() ^ (usize::BITS - 1); // `ilog2`, in the shape that becomes one instruction
    (s >> (e - 3)) + 8 * e as usize - 56
}

/// The block size of a class: the inverse of [`class_of`].
pub(crate) const fn class_size(class: usize) -> usize {
    if class < 8 {
        return MIN_BLOCK * (class + 1);
    }
    let e = 7 + (class - 8) / 8;
    (9 + (class - 8) % 8) << (e - 3)
}

/// `size` rounded up to a multiple of `align` (a power of two); `None` above `isize::MAX`.
#[inline(always)]
pub(crate) const fn round_up(size: usize, align: usize) -> Option<usize> {
    match size.checked_add(align - 1) {
        Some(sum) if sum & !(align - 1) <= isize::MAX as usize => Some(sum & !(align - 1)),
        _ => None,
    }
}

/// Classes whose blocks share spans.
pub(crate) const SHARED_CLASSES: usize = class_of(SHARED_MAX) + 1;

/// As [`class_for`], for the hot path: a class beyond all [shared ones](SHARED_CLASSES) where `class_for` knows better or none,
/// also for size 0.
#[inline(always)]
pub(crate) const fn shared_class_for(size: usize, align: usize) -> usize {
    // Every class is a multiple of the smallest block.
    let rounded = if align <= MIN_BLOCK {
        size
    } else if size <= SHARED_MAX {
        (size + align - 1) & !(align - 1)
    } else {
        return usize::MAX;
    };
    let s = rounded.wrapping_sub(1);
    if s < TABLED {
        CLASS_TABLE[s / MIN_BLOCK] as usize
    } else {
        class_of(rounded)
    }
}

/// Sizes up to this have their class looked up; above, it is computed.
const TABLED: usize = 32 << 10;

/// The class of each multiple of the smallest block, less one block.
static CLASS_TABLE: [u8; TABLED / MIN_BLOCK] = {
    let mut table = [0; TABLED / MIN_BLOCK];
    let mut at = 0;
    while at < table.len() {
        table[at] = class_of((at + 1) * MIN_BLOCK) as u8;
        at += 1;
    }
    table
};

/// The class for a size and an alignment up to [`GRANULE`], or `None` where no class is large enough.
///
/// A size rounded up to the alignment is either a class itself (where the alignment is at least the step between
/// classes) or falls in a class that is a multiple of the step, and so of the alignment. Span bases are granule-aligned.
#[inline(always)]
pub(crate) const fn class_for(size: usize, align: usize) -> Option<usize> {
    let size = if size == 0 { 1 } else { size };
    match round_up(size, align) {
        Some(rounded) if rounded <= LARGE_MAX => Some(class_of(rounded)),
        _ => None,
    }
}

/// Bytes of the span that serves a class, within a segment of `segment_bytes`; `None` where the class does not fit
/// and its blocks are huge.
pub(crate) const fn span_bytes(class: usize, segment_bytes: usize) -> Option<usize> {
    let block = class_size(class);
    let ideal = if block <= 8 << 10 {
        64 << 10
    } else if block <= 64 << 10 {
        512 << 10
    } else if block <= SHARED_MAX {
        4 << 20
    } else {
        (block + GRANULE - 1) & !(GRANULE - 1)
    };
    let fits = if block <= SHARED_MAX && ideal > segment_bytes { segment_bytes } else { ideal };
    // A block that takes more than half of a small segment would leave the rest unusable.
    if fits > segment_bytes || (block > SHARED_MAX && block > segment_bytes / 2) {
        None
    } else {
        Some(fits)
    }
}

/// Size of the largest block that a free run of `run` bytes can serve; 0 where it is too short for any.
pub(crate) fn largest_block_in(run: usize, segment_bytes: usize) -> usize {
    let fits = |class: &usize| span_bytes(*class, segment_bytes).is_some_and(|bytes| bytes <= run);
    (0..CLASSES).rev().find(fits).map_or(0, class_size)
}

/// The multiplier that turns an offset into a block's index, and tells whether a block starts there: see [`exact_index`].
/// That of a span of one block does not depend on its size.
pub(crate) const fn reciprocal(block: usize, blocks: usize) -> u64 {
    match blocks {
        0 => 0,                           // no block starts anywhere
        1 => 1,                           // only at offset 0
        _ => u64::MAX / block as u64 + 1, // ceil(2^64 / block), of 2 and more
    }
}

/// The index of the block that starts exactly at `offset`; `None` for any other offset.
///
/// With `m = ceil(2^64 / d)` and `n = q * d + r`, the product `n * m` is `q * 2^64 + q * e + r * m`, where `e < d` is what the
/// ceiling added. While `n * d < 2^64`, the lower half is below `m` exactly if `r` is 0, and the upper half is `q` then
/// (Lemire, Kaser, Kurz: Faster remainder by direct computation, 2019). A span has at most 2^25 bytes where it has several blocks.
#[inline(always)]
pub(crate) const fn exact_index(offset: usize, reciprocal: u64) -> Option<usize> {
    let product = offset as u128 * reciprocal as u128;
    if (product as u64) < reciprocal {
        Some((product >> 64) as usize)
    } else {
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_size_falls_in_the_smallest_class_that_holds_it() {
        for size in 1..=LARGE_MAX {
            let class = class_of(size);
            assert!(class_size(class) >= size, "{size}");
            assert!(class == 0 || class_size(class - 1) < size, "{size}");
        }
        assert_eq!(CLASSES, 136);
    }

    #[test]
    fn the_hot_path_and_the_others_agree_on_classes() {
        for align in (0..=GRANULE_SHIFT).map(|shift| 1 << shift) {
            for size in (1..20_000).chain((SHARED_MAX - 20_000..=SHARED_MAX).step_by(13)) {
                let class = class_for(size, align).filter(|class| *class < SHARED_CLASSES);
                let hot = Some(shared_class_for(size, align)).filter(|class| *class < SHARED_CLASSES);
                assert_eq!(hot, class, "{size} {align}");
            }
            for size in
                [0, SHARED_MAX + 1, LARGE_MAX, LARGE_MAX + 1, usize::MAX - 16, usize::MAX - 1, usize::MAX]
            {
                assert!(shared_class_for(size, align) >= SHARED_CLASSES, "{size} {align}");
            }
        }
    }

    #[test]
    fn waste_above_the_smallest_classes_is_at_most_an_eighth() {
        for size in 129..=LARGE_MAX {
            let waste = class_size(class_of(size)) - size;
            assert!(waste * 8 <= class_size(class_of(size)), "{size}");
        }
    }

    #[test]
    fn a_run_serves_blocks_up_to_the_largest_whose_span_fits() {
        assert_eq!(
            largest_block_in(32 << 20, 32 << 20),
            LARGE_MAX,
            "larger ones are huge, however long the run"
        );
        assert_eq!(largest_block_in((8 << 20) - GRANULE, 32 << 20), 15 << 19);
        assert_eq!(largest_block_in(512 << 10, 32 << 20), 64 << 10, "512 KiB would need a span of 4 MiB");
        assert_eq!(largest_block_in(GRANULE, 32 << 20), 8 << 10);
        assert_eq!(largest_block_in(2 << 20, 2 << 20), 1 << 20, "more than half of a small segment is huge");
        assert_eq!(largest_block_in(0, 32 << 20), 0);
    }

    #[test]
    fn classes_are_multiples_of_the_alignment_asked() {
        for shift in 4..=GRANULE_SHIFT {
            let align = 1usize << shift;
            for size in (0..200_000).step_by(7).chain((200_000..=LARGE_MAX - align).step_by(4093)) {
                let class = class_for(size, align).unwrap();
                assert_eq!(class_size(class) % align, 0, "{size} {align}");
                assert!(class_size(class) >= size);
            }
        }
    }

    #[test]
    fn rounding_is_checked_at_the_edges() {
        assert_eq!(round_up(usize::MAX, 16), None);
        assert_eq!(round_up(isize::MAX as usize, 2), None);
        assert_eq!(round_up(isize::MAX as usize - 15, 16), Some(isize::MAX as usize - 15));
        assert_eq!(class_for(usize::MAX, 4096), None);
        assert_eq!(class_for(LARGE_MAX + 1, 16), None);
    }

    #[test]
    fn rounding_equals_plain_arithmetic_at_every_edge_of_usize() {
        let edges = [0, 1 << 16, LARGE_MAX, isize::MAX as usize, usize::MAX];
        for edge in edges {
            for size in (0..130).flat_map(|off| [edge.saturating_sub(off), edge.saturating_add(off)]) {
                for shift in 0..usize::BITS - 1 {
                    let align = 1usize << shift;
                    let exact = (size as u128).next_multiple_of(align as u128);
                    let expected = (exact <= isize::MAX as u128).then_some(exact as usize);
                    assert_eq!(round_up(size, align), expected, "{size} {align}");
                    if align <= GRANULE {
                        let fits = (size.max(1) as u128).next_multiple_of(align as u128) <= LARGE_MAX as u128;
                        assert_eq!(class_for(size, align).is_some(), fits, "{size} {align}");
                    }
                }
            }
        }
    }

    #[test]
    fn reciprocals_find_every_block_and_nothing_else() {
        for segment in [2 << 20, 8 << 20, 32 << 20] {
            for class in 0..CLASSES {
                let Some(bytes) = span_bytes(class, segment) else { continue };
                let (block, blocks) = (class_size(class), bytes / class_size(class));
                let reciprocal = reciprocal(block, blocks);
                assert!(bytes >= block && bytes % GRANULE == 0);
                assert!(blocks <= MAX_BLOCKS);
                for offset in 0..bytes {
                    let exact =
                        (offset % block == 0 && (blocks > 1 || offset == 0)).then_some(offset / block);
                    assert_eq!(exact_index(offset, reciprocal), exact, "{block} {offset}");
                }
            }
        }
    }

    #[test]
    fn the_one_block_of_a_span_starts_at_its_base_alone() {
        let reciprocal = reciprocal(1 << 46, 1);
        assert_eq!(exact_index(0, reciprocal), Some(0));
        assert_eq!(exact_index(0, super::reciprocal(1, 0)), None);
        for shift in 0..usize::BITS {
            for offset in [1 << shift, usize::MAX >> shift] {
                assert_eq!(exact_index(offset, reciprocal), None, "{offset:#x}");
            }
        }
    }
}

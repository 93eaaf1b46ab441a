//! Where a block should live, and for which device: the key that memory is pooled by.

/// Who touches a block most. Only a hint: contents are the same wherever they live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[non_exhaustive]
pub enum Placement {
    /// No advice for large blocks; small ones prefer the host.
    #[default]
    Auto,
    /// Preferred on the host, mapped by the device: nothing migrates. Mailboxes, staging, parameters.
    Host,
    /// Backed on the GPU before the first kernel.
    Device,
    /// Written once, read by both sides. A later write is very slow.
    ReadMostly,
}

/// What became of a hint: of a placement, or of a prefetch. Contents are the same either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    /// It was followed.
    Applied,
    /// It cannot apply here, and nothing was done, for this reason.
    NotApplicable(&'static str),
}

/// Why advice does nothing on a device whose memory the CPU may not touch during a kernel.
pub(crate) const PAGES_MOVE_AT_A_LAUNCH: &str =
    "this device has no concurrent managed access: pages move at a launch";

/// A device and a placement. Memory of different places is never mixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Place {
    /// Index of the device in CUDA's enumeration; 0 on the host backend.
    pub device: u16,
    /// Who touches the memory most.
    pub placement: Placement,
}

impl Place {
    /// Device 0, no advice.
    pub const DEFAULT: Self = Self { device: 0, placement: Placement::Auto };
}

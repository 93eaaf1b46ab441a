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

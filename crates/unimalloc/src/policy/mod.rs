//! Layer 4: what a policy asks of its blocks, decided at compile time.
//!
//! | | Standard | Secure | Hardened |
//! | --- | --- | --- | --- |
//! | free lists | plain | plain | keyed and tagged |
//! | zero on allocation | on request | always | always |
//! | poison after free | no | yes | yes |
//! | order of free blocks in a fresh span | address | shuffled | shuffled |
//! | quarantine, redzones | no | no | yes |
//!
//! A block keeps the policy it was allocated under: its span's *lane* says which, whoever frees it.

pub(crate) mod redzone;

/// A policy by name, for callers that choose at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(u8)]
pub enum Policy {
    /// Every free is checked; nothing else is spent.
    #[default]
    Standard = 0,
    /// And blocks start as zeros, are poisoned when freed, and come in shuffled order.
    Secure = 1,
    /// And free lists are keyed and verified, freed blocks are kept back, and redzones are checked.
    Hardened = 2,
}

/// What allocations under a policy are promised.
///
/// The three policies of this crate implement it; there is no use in implementing it elsewhere.
pub trait AllocPolicy: sealed::Sealed + 'static {
    /// Whether free-list links are keyed, tagged, and verified at every use.
    const ENABLE_FREE_LIST_ENCRYPTION: bool;
    /// The policy's name as a value.
    const POLICY: Policy;
    /// Whether every block is zero when it is handed out.
    const ZERO_ON_ALLOCATION: bool;
    /// Whether a block is overwritten with [`POISON`] once it is freed.
    const POISON_ON_FREE: bool;
}

/// The byte that freed blocks of Secure and Hardened are filled with.
pub const POISON: u8 = 0xDE;

/// Plain free lists; contents untouched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StandardPolicy;

/// Plain free lists; zeroed, poisoned, shuffled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SecurePolicy;

/// Encoded free lists, quarantine, redzones; zeroed, poisoned, shuffled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HardenedPolicy;

impl AllocPolicy for StandardPolicy {
    const ENABLE_FREE_LIST_ENCRYPTION: bool = false;
    const POLICY: Policy = Policy::Standard;
    const ZERO_ON_ALLOCATION: bool = false;
    const POISON_ON_FREE: bool = false;
}

impl AllocPolicy for SecurePolicy {
    const ENABLE_FREE_LIST_ENCRYPTION: bool = false;
    const POLICY: Policy = Policy::Secure;
    const ZERO_ON_ALLOCATION: bool = true;
    const POISON_ON_FREE: bool = true;
}

impl AllocPolicy for HardenedPolicy {
    const ENABLE_FREE_LIST_ENCRYPTION: bool = true;
    const POLICY: Policy = Policy::Hardened;
    const ZERO_ON_ALLOCATION: bool = true;
    const POISON_ON_FREE: bool = true;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::StandardPolicy {}
    impl Sealed for super::SecurePolicy {}
    impl Sealed for super::HardenedPolicy {}
}

impl Policy {
    /// The policy with this discriminant; Standard for any other number.
    pub(crate) const fn from_lane(lane: u8) -> Self {
        match lane {
            1 => Self::Secure,
            2 => Self::Hardened,
            _ => Self::Standard,
        }
    }

    pub(crate) const fn poisons(self) -> bool {
        !matches!(self, Self::Standard)
    }

    pub(crate) const fn zeroes(self) -> bool {
        !matches!(self, Self::Standard)
    }

    pub(crate) const fn shuffles(self) -> bool {
        !matches!(self, Self::Standard)
    }

    pub(crate) const fn encoded(self) -> bool {
        matches!(self, Self::Hardened)
    }
}

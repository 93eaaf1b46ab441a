//! Which entry point came with which driver. A driver older than that neither exports the name nor answers
//! `cuGetProcAddress` for it. A name that is not listed has been there since before CUDA 12.

/// What the library says it is unless told otherwise.
pub const DEFAULT_VERSION: u32 = 13_000;
/// A driver from before the location-based `cuMemAdvise_v2` and `cuMemPrefetchAsync_v2`.
pub const OLD_VERSION: u32 = 12_010;

/// (exported name, first driver version that has it)
pub const INTRODUCED: &[(&str, u32)] = &[
    ("cuStreamGetCaptureInfo_v3", 12_030),
    ("cuMemAdvise_v2", 12_020),
    ("cuMemPrefetchAsync_v2", 12_020),
    ("cuFuncGetParamInfo", 12_040),
    ("cuEventElapsedTime_v2", 12_080),
    ("cuMemPrefetchBatchAsync", 13_000),
    ("cuMemDiscardAndPrefetchBatchAsync", 13_000),
];

/// The first driver version that has `name`; 0 when it was always there.
pub fn introduced(name: &str) -> u32 {
    INTRODUCED.iter().find(|(known, _)| *known == name).map_or(0, |(_, version)| *version)
}

/// The newest PTX instruction set that a driver's compiler takes, as major * 10 + minor.
pub fn ptx_version(driver: u32) -> u32 {
    match driver {
        13_000.. => 90 + (driver - 13_000) / 10,
        12_090.. => 88,
        12_080.. => 87,
        12_050.. => 85,
        12_040.. => 84,
        12_030.. => 83,
        12_020.. => 82,
        12_010.. => 81,
        _ => 80,
    }
}

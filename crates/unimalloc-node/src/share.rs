//! Arrays seen from several threads: tokens that name a block without being an address.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use napi::bindgen_prelude::{Env, Float64ArraySlice, Unknown};
use napi::Result;
use napi_derive::napi;

use crate::block::{Block, Share};
use crate::buffer::{self, BufferError};
use crate::failure::failure;
use crate::holds::{self, Handle};
use crate::out;

/// 128 random bits, so that a token cannot be guessed, and a token of a block that is gone never names another.
type TokenId = [u8; 16];

/// What a token leads to.
enum Shared {
    /// Holds no reference: the token is good for as long as some array is.
    Weak(Weak<Block>),
    /// Handed over: the token itself is a visible holder until the first attach.
    HandedOver(Arc<Block>),
}

#[derive(Default)]
struct Tokens {
    by_id: HashMap<TokenId, Shared>,
    /// Dead entries are swept when the table reaches this size, which then doubles: amortised constant time.
    sweep_at: usize,
}

static TOKENS: OnceLock<Mutex<Tokens>> = OnceLock::new();

fn tokens() -> MutexGuard<'static, Tokens> {
    TOKENS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

fn random_id() -> Result<TokenId> {
    let mut id = TokenId::default();
    getrandom::fill(&mut id).map_err(|error| {
        failure(
            "INVALID_ARGUMENT",
            format!("the system's random source failed ({error}): no token can be made"),
        )
    })?;
    Ok(id)
}

fn to_hex(id: &TokenId) -> String {
    id.iter().fold(String::with_capacity(32), |mut hex, byte| {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

fn from_hex(hex: &str) -> Option<TokenId> {
    let mut id = TokenId::default();
    if hex.len() != 32 || !hex.is_ascii() {
        return None;
    }
    for (byte, digits) in id.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(id)
}

fn stale() -> napi::Error {
    failure(
        "STALE_TOKEN",
        "the shared array is gone: keep an array over it alive until the other thread has attached, \
         or hand it over with share(array, { transfer: true })",
    )
}

/// Random number of this process, to tell tokens of other processes apart.
#[napi(catch_unwind)]
pub fn process_nonce() -> Result<String> {
    static NONCE: OnceLock<TokenId> = OnceLock::new();
    if let Some(nonce) = NONCE.get() {
        return Ok(to_hex(nonce));
    }
    let fresh = random_id()?;
    Ok(to_hex(NONCE.get_or_init(|| fresh)))
}

/// A token for the block of a held array; the same block always gets the same one. With `hand_over` the token itself keeps
/// the block alive until the first attach.
#[napi(catch_unwind)]
pub fn share_block(handle: f64, hand_over: bool) -> Result<String> {
    let block = holds::block(Handle::from_number(handle)).ok_or_else(stale)?;
    let id = match block.token.get() {
        Some(id) => *id,
        None => {
            let fresh = random_id()?;
            *block.token.get_or_init(|| fresh)
        }
    };
    let mut tokens = tokens();
    if tokens.by_id.len() >= tokens.sweep_at.max(64) {
        tokens.by_id.retain(|_, shared| match shared {
            Shared::Weak(block) => block.strong_count() > 0,
            Shared::HandedOver(_) => true,
        });
        tokens.sweep_at = tokens.by_id.len() * 2;
    }
    if hand_over {
        if matches!(tokens.by_id.get(&id), Some(Shared::HandedOver(_))) {
            return Ok(to_hex(&id));
        }
        if !block.hold() {
            return Err(stale());
        }
        tokens.by_id.insert(id, Shared::HandedOver(block));
    } else {
        tokens.by_id.entry(id).or_insert_with(|| Shared::Weak(Arc::downgrade(&block)));
    }
    Ok(to_hex(&id))
}

/// A buffer in this environment over the block that a token names. `out` gets handle, address, usable bytes and requested
/// bytes.
#[napi(catch_unwind, ts_return_type = "ArrayBuffer")]
pub fn attach_block<'env>(
    env: &'env Env,
    token: String,
    mut out: Float64ArraySlice<'_>,
) -> Result<Unknown<'env>> {
    let id = from_hex(&token).ok_or_else(|| {
        failure("INVALID_ARGUMENT", "not a token: pass the object that share() returned, unchanged")
    })?;
    let block = {
        let mut tokens = tokens();
        match tokens.by_id.get_mut(&id) {
            None => return Err(stale()),
            Some(shared) => match shared {
                Shared::Weak(weak) => {
                    let block = weak.upgrade().ok_or_else(stale)?;
                    if !block.hold() {
                        return Err(stale());
                    }
                    block
                }
                // The token's own hold becomes the buffer's.
                Shared::HandedOver(block) => {
                    let weak = Shared::Weak(Arc::downgrade(block));
                    match std::mem::replace(shared, weak) {
                        Shared::HandedOver(block) => block,
                        Shared::Weak(_) => return Err(stale()),
                    }
                }
            },
        }
    };
    let address = block.address();
    let (usable, requested) = (block.usable(), block.requested());
    // SAFETY: napi-rs calls this on the environment's thread; the face attaches a block once per environment.
    match unsafe { buffer::create(env.raw(), Share::Common(block)) } {
        Ok((value, handle)) => {
            let facts = [handle.to_number(), address as f64, usable as f64, requested as f64];
            out::write(&mut out, 0, &facts);
            // SAFETY: `value` was made in this environment by the call above.
            Ok(unsafe { Unknown::from_raw_unchecked(env.raw(), value) })
        }
        Err(BufferError::Banned) => Err(failure(
            "EXTERNAL_BUFFERS_BANNED",
            "this runtime forbids ArrayBuffers over native memory: run the code in a plain Node process",
        )),
        Err(BufferError::Refused) => {
            Err(failure("INVALID_ARGUMENT", "this engine cannot make a buffer of the shared array's size"))
        }
    }
}

/// Visible holders of a held block: arrays in all threads, and a token that was handed over.
#[napi(catch_unwind)]
pub fn holder_count(handle: f64) -> Result<u32> {
    Ok(holds::with(Handle::from_number(handle), |hold| hold.block.holders()).unwrap_or(0))
}

//! Makes exported names of a shared object unfindable, so that one build can stand in for drivers of any age.
//!
//! The dynamic loader finds a name by its hash and then compares the text. Changing the text and leaving the hash makes
//! the lookup fail for the old name and for the new one alike.

const SECTION_TYPE_DYNSYM: u32 = 11;
const SYMBOL_SIZE: usize = 24;

fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?).into())
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?)).ok()
}

/// Hides every exported name for which `hide` says so and gives the names; `None` if this is no 64-bit ELF library.
pub fn hide_exports(library: &mut [u8], hide: impl Fn(&str) -> bool) -> Option<Vec<String>> {
    (library.get(..6)? == b"\x7fELF\x02\x01").then_some(())?;
    let (sections, size, count) = (u64_at(library, 0x28)?, u16_at(library, 0x3a)?, u16_at(library, 0x3c)?);
    let header = |index: usize| sections + index * size;
    let dynsym = (0..count).map(header).find(|at| u32_at(library, at + 4) == Some(SECTION_TYPE_DYNSYM))?;
    let (symbols, bytes) = (u64_at(library, dynsym + 0x18)?, u64_at(library, dynsym + 0x20)?);
    let strings = u64_at(library, header(u32_at(library, dynsym + 0x28)? as usize) + 0x18)?;
    let mut hidden = Vec::new();
    for symbol in (symbols..symbols + bytes).step_by(SYMBOL_SIZE) {
        let defined = u16_at(library, symbol + 6)? != 0;
        let name = strings + u32_at(library, symbol)? as usize;
        let text = library.get(name..)?;
        let text = std::str::from_utf8(&text[..text.iter().position(|byte| *byte == 0)?]).ok()?;
        if defined && hide(text) {
            hidden.push(text.to_owned());
            library[name] = b'!';
        }
    }
    Some(hidden)
}

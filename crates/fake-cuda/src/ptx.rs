//! As much PTX as it takes to know the kernels of a module and the layout of their parameters.

use crate::codes::*;

/// One parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    pub offset: usize,
    pub size: usize,
    /// Declared `.f16`, `.f32` or `.f64`.
    pub float: bool,
}

/// One `.entry`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub params: Vec<Param>,
    /// `.maxntid` product or the device's limit.
    pub max_threads: u32,
}

impl Entry {
    /// Bytes of the parameter buffer.
    pub fn param_bytes(&self) -> usize {
        self.params.last().map_or(0, |last| last.offset + last.size)
    }
}

/// A text the driver's compiler refuses: its code, and what goes into the error log.
#[derive(Debug, PartialEq, Eq)]
pub struct Rejected {
    pub code: CUresult,
    pub log: String,
}

fn rejected<T>(code: CUresult, line: usize, what: &str) -> Result<T, Rejected> {
    let log = format!(
        "ptxas application ptx input, line {line}; fatal   : {what}\nptxas fatal   : Ptx assembly aborted due to errors"
    );
    Err(Rejected { code, log })
}

/// Parses a module for a device of capability `compute` and a driver that takes PTX up to `newest`.
pub fn parse(text: &str, newest: u32, compute: u32) -> Result<Vec<Entry>, Rejected> {
    let text = without_comments(text);
    let Some(version) = directive(&text, ".version") else {
        return Err(Rejected { code: ERROR_INVALID_IMAGE, log: String::new() });
    };
    let Some((major, minor)) =
        version.split_once('.').and_then(|(a, b)| Some((a.parse::<u32>().ok()?, b.parse::<u32>().ok()?)))
    else {
        return rejected(ERROR_INVALID_PTX, 1, "Parsing error near '.version': syntax error");
    };
    if major * 10 + minor > newest {
        let what =
            format!("Unsupported .version {version}; current version is '{}.{}'", newest / 10, newest % 10);
        return rejected(ERROR_UNSUPPORTED_PTX_VERSION, 1, &what);
    }
    let Some(target) = directive(&text, ".target") else {
        return rejected(ERROR_INVALID_PTX, 2, "Missing .target directive");
    };
    let digits: String = target.chars().filter(char::is_ascii_digit).collect();
    match digits.parse::<u32>() {
        Ok(wanted) if wanted <= compute => {}
        Ok(_) => {
            let what = format!(
                "SM version specified by .target is higher than default SM version assumed: {target}"
            );
            return rejected(ERROR_INVALID_PTX, 2, &what);
        }
        Err(_) => return rejected(ERROR_INVALID_PTX, 2, "Unknown .target"),
    }
    check_brackets(&text)?;
    let mut entries = Vec::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find(".entry") {
        rest = &rest[at + ".entry".len()..];
        entries.push(entry(&text, rest)?);
    }
    Ok(entries)
}

fn without_comments(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let (before, tail) = rest.split_at(at);
        clean.push_str(before);
        rest = if tail.starts_with("//") {
            tail.find('\n').map_or("", |end| &tail[end..])
        } else if tail.starts_with("/*") {
            tail.find("*/").map_or("", |end| &tail[end + 2..])
        } else {
            clean.push('/');
            &tail[1..]
        };
    }
    clean.push_str(rest);
    clean
}

fn directive<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let at = text.find(name)?;
    text[at + name.len()..].split([' ', '\t', '\n', '\r', ',']).find(|word| !word.is_empty())
}

fn check_brackets(text: &str) -> Result<(), Rejected> {
    let mut open = Vec::new();
    for (line, content) in text.lines().enumerate() {
        for c in content.chars() {
            let expected = match c {
                '{' | '(' | '[' if c != '{' || open.last().is_none_or(|(last, _)| *last == '{') => {
                    open.push((c, line));
                    continue;
                }
                '}' => '{',
                // A body cannot begin inside a list.
                '{' => ' ',
                ')' => '(',
                ']' => '[',
                _ => continue,
            };
            if open.pop().map(|(opened, _)| opened) != Some(expected) {
                return rejected(
                    ERROR_INVALID_PTX,
                    line + 1,
                    &format!("Parsing error near '{c}': syntax error"),
                );
            }
        }
    }
    match open.last() {
        Some((c, line)) => {
            rejected(ERROR_INVALID_PTX, line + 1, &format!("Parsing error near '{c}': syntax error"))
        }
        None => Ok(()),
    }
}

/// `rest` begins right after `.entry`.
fn entry(text: &str, rest: &str) -> Result<Entry, Rejected> {
    let line = text[..text.len() - rest.len()].lines().count();
    let syntax =
        |what: &str| rejected(ERROR_INVALID_PTX, line, &format!("Parsing error near '{what}': syntax error"));
    let head = rest.trim_start();
    let end = head.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$')).unwrap_or(head.len());
    let (name, tail) = head.split_at(end);
    if name.is_empty() {
        return syntax(".entry");
    }
    let tail = tail.trim_start();
    let (list, after) = match tail.strip_prefix('(') {
        Some(inside) => {
            let Some((list, after)) = inside.split_once(')') else { return syntax(name) };
            (list, after)
        }
        None => ("", tail),
    };
    let Some((limits, _)) = after.split_once('{') else { return syntax(name) };
    let mut params = Vec::new();
    let mut offset = 0usize;
    for declaration in list.split(',').map(str::trim).filter(|declaration| !declaration.is_empty()) {
        let Some((size, align, float)) = param(declaration) else { return syntax(declaration) };
        offset = offset.next_multiple_of(align);
        params.push(Param { offset, size, float });
        offset += size;
    }
    let max_threads = directive(limits, ".maxntid").map_or(1024, |first| {
        let at = limits.find(first).unwrap_or(0);
        let numbers = limits[at..].split('\n').next().unwrap_or(first).split('.').next().unwrap_or(first);
        numbers.split(',').filter_map(|n| n.trim().parse::<u32>().ok()).product()
    });
    Ok(Entry { name: name.into(), params, max_threads })
}

/// Size, alignment, and whether it is a floating-point number.
fn param(declaration: &str) -> Option<(usize, usize, bool)> {
    let mut words = declaration.split_whitespace();
    (words.next()? == ".param").then_some(())?;
    let mut word = words.next()?;
    let mut align = None;
    if word == ".align" {
        align = words.next()?.parse::<usize>().ok().filter(|align| align.is_power_of_two());
        word = words.next()?;
    }
    let element = match word {
        ".u8" | ".s8" | ".b8" => 1,
        ".u16" | ".s16" | ".b16" | ".f16" => 2,
        ".u32" | ".s32" | ".b32" | ".f32" | ".f16x2" => 4,
        ".u64" | ".s64" | ".b64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    };
    let count = match declaration.split_once('[') {
        Some((_, tail)) => tail.trim_end().strip_suffix(']')?.trim().parse::<usize>().ok()?,
        None => 1,
    };
    Some((element * count, align.unwrap_or(element), word.starts_with(".f")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

    fn parse_80(body: &str) -> Result<Vec<Entry>, Rejected> {
        parse(&format!("{HEAD}{body}"), 90, 90)
    }

    #[test]
    fn parameters_as_the_compiler_writes_them() {
        let entries = parse_80(
            "// fill\n.visible .entry fill_f32(\n\t.param .u64 .ptr .align 1 fill_f32_param_0,\n\t.param .u32 fill_f32_param_1,\n\
             \t.param .f32 fill_f32_param_2\n)\n{\n\tret;\n}\n.entry none()\n{ ret; }\n\
             .visible .entry packed(.param .u8 a, .param .align 8 .b8 b[24], .param .u16 c) .maxntid 256, 1, 1 { ret; }",
        )
        .unwrap();
        let offsets = |entry: &Entry| entry.params.iter().map(|p| (p.offset, p.size)).collect::<Vec<_>>();
        assert_eq!(entries[0].name, "fill_f32");
        assert_eq!(offsets(&entries[0]), [(0, 8), (8, 4), (12, 4)]);
        assert!(entries[0].params[2].float && !entries[0].params[1].float);
        assert_eq!(entries[1].params, []);
        assert_eq!(offsets(&entries[2]), [(0, 1), (8, 24), (32, 2)]);
        assert_eq!((entries[0].max_threads, entries[2].max_threads), (1024, 256));
        assert_eq!(entries[2].param_bytes(), 34);
    }

    #[test]
    fn what_the_compiler_refuses() {
        let code = |text: &str| parse(text, 90, 90).unwrap_err().code;
        assert_eq!(code("ELF"), ERROR_INVALID_IMAGE);
        assert_eq!(code(".version 99.0\n.target sm_80\n"), ERROR_UNSUPPORTED_PTX_VERSION);
        assert_eq!(code(".version 8.0\n.target sm_100\n"), ERROR_INVALID_PTX);
        assert_eq!(code(".version 8.0\n"), ERROR_INVALID_PTX);
        let broken = parse_80(".visible .entry broken(.param .u64 a)\n{ ret;\n").unwrap_err();
        assert_eq!(broken.code, ERROR_INVALID_PTX);
        assert!(broken.log.contains("line 5"), "{}", broken.log);
        assert_eq!(parse_80(".entry odd(.param .q7 a) { }").unwrap_err().code, ERROR_INVALID_PTX);
    }
}

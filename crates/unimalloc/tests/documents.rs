//! The pages that list promises name their tests: each one must be there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Source files under a folder, as one text.
fn sources(folder: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            text += &sources(&path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text += &fs::read_to_string(path).unwrap_or_default();
        }
    }
    text
}

/// The parts of a line between backticks.
fn code(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

#[test]
fn every_test_that_the_documents_name_is_there() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.join("../..");
    if !root.join("docs/reliability.md").exists() {
        println!("skipped: the crate is here without its documents");
        return;
    }
    let in_source = sources(&here.join("src"));
    let mut missing = BTreeSet::new();
    let mut named = 0;
    for page in ["docs/reliability.md", "docs/contract.md"] {
        for line in fs::read_to_string(root.join(page)).unwrap().lines() {
            for (file, name) in code(line).filter_map(|code| code.split_once("::")) {
                let folders = [here.join("tests"), root.join("crates/unimalloc-node/tests")];
                let mut paths = folders.iter().map(|folder| folder.join(file).with_extension("rs"));
                let text = match (file, paths.find(|path| path.exists())) {
                    ("src", _) => in_source.clone(),
                    (_, Some(path)) => fs::read_to_string(path).unwrap(),
                    _ => continue, // a path of Rust items
                };
                named += 1;
                let text = text.replace("!(\n    ", "!("); // where rustfmt has broken the line
                if !text.contains(&format!("fn {name}(")) && !text.contains(&format!("!({name},")) {
                    missing.insert(format!("{page}: {file}::{name}"));
                }
            }
            let Some((_, titles)) = line.split_once(".spec.ts` \"") else { continue };
            let spec = code(line).find(|code| code.ends_with(".spec.ts")).unwrap();
            let text = fs::read_to_string(root.join("__test__").join(spec)).unwrap_or_default();
            for title in titles.split('"').step_by(2).filter(|title| title.len() > 2) {
                named += 1;
                if !text.contains(title) {
                    missing.insert(format!("{page}: {spec} {title:?}"));
                }
            }
        }
    }
    assert!(named > 100, "{named} tests named: the pages are read wrongly");
    assert!(missing.is_empty(), "not there: {missing:#?}");
}

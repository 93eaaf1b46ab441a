//! Modules and their functions.

use crate::codes::*;
use crate::context::{self, Context};
use crate::entry::{lock, runtime};
use crate::ptx::{self, Entry, Rejected};
use crate::versions::ptx_version;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::{Arc, Mutex};

const HANDLES: usize = 0x7800_0000;
const HANDLE_STEP: usize = 0x40;

/// A kernel of a loaded module.
pub struct Function {
    pub entry: Entry,
    pub context: usize,
    pub module: usize,
    /// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
    pub dynamic_shared: AtomicU32,
}

#[derive(Default)]
struct Modules {
    live: BTreeMap<usize, (usize, Vec<Entry>)>,
    functions: BTreeMap<usize, Arc<Function>>,
    ever: usize,
}

static MODULES: Mutex<Modules> =
    Mutex::new(Modules { live: BTreeMap::new(), functions: BTreeMap::new(), ever: 0 });

impl Modules {
    fn handle(&mut self) -> usize {
        self.ever += 1;
        HANDLES + self.ever * HANDLE_STEP
    }
}

/// `cuModuleLoadData` of PTX text.
pub fn load(context: &Context, text: &str) -> Result<usize, Rejected> {
    let config = &runtime().config;
    let entries = ptx::parse(text, ptx_version(config.driver_version), config.compute)?;
    let mut modules = lock(&MODULES);
    let handle = modules.handle();
    modules.live.insert(handle, (context.handle, entries));
    Ok(handle)
}

/// `cuModuleUnload`.
pub fn unload(handle: usize) -> Outcome {
    let mut modules = lock(&MODULES);
    let (owner, _) = modules.live.get(&handle).ok_or(ERROR_INVALID_HANDLE)?;
    context::find(*owner).ok_or(ERROR_CONTEXT_IS_DESTROYED)?.check_lost()?;
    modules.live.remove(&handle);
    modules.functions.retain(|_, function| function.module != handle);
    Ok(())
}

/// `cuModuleGetFunction`: the same handle for the same kernel.
pub fn function(module: usize, name: &str) -> Outcome<usize> {
    let mut modules = lock(&MODULES);
    let (context, entries) = modules.live.get(&module).ok_or(ERROR_INVALID_HANDLE)?;
    let entry = entries.iter().find(|entry| entry.name == name).cloned().ok_or(ERROR_NOT_FOUND)?;
    let context = *context;
    let known =
        modules.functions.iter().find(|(_, f)| f.module == module && f.entry.name == name).map(|(h, _)| *h);
    if let Some(handle) = known {
        return Ok(handle);
    }
    let handle = modules.handle();
    let function = Function { entry, context, module, dynamic_shared: AtomicU32::new(48 << 10) };
    modules.functions.insert(handle, Arc::new(function));
    Ok(handle)
}

/// The function of a handle.
pub fn resolve(handle: usize) -> Outcome<Arc<Function>> {
    lock(&MODULES).functions.get(&handle).cloned().ok_or(ERROR_INVALID_HANDLE)
}

/// Number of kernels in a module.
pub fn function_count(module: usize) -> Outcome<usize> {
    lock(&MODULES).live.get(&module).map(|(_, entries)| entries.len()).ok_or(ERROR_INVALID_HANDLE)
}

/// Unloads the modules of a context that ends.
pub fn drop_of_context(context: usize) {
    let mut modules = lock(&MODULES);
    modules.live.retain(|_, (owner, _)| *owner != context);
    modules.functions.retain(|_, function| function.context != context);
}

/// Modules that are loaded.
pub fn live() -> u64 {
    lock(&MODULES).live.len() as u64
}

impl Function {
    /// `cuFuncGetAttribute`.
    pub fn attribute(&self, which: i32) -> Option<i32> {
        let config = &runtime().config;
        Some(match which {
            0 => self.entry.max_threads as i32,
            1..=3 => 0,
            4 => 16,
            5 | 6 => config.compute as i32,
            7 => 0,
            8 => self.dynamic_shared.load(Relaxed) as i32,
            9 => -1,
            10..=15 => 0,
            _ => return None,
        })
    }
}

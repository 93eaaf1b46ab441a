//! Graphs, as far as a capture makes them.

use crate::capture;
use crate::entry::{entries, put};
use crate::stream;

entries! {
    fn cuGraphDestroy[Ctx _c](graph: usize) {
        capture::drop_graph(graph)
    }

    fn cuGraphInstantiateWithFlags[Ctx _c](out: *mut usize, graph: usize, _flags: u64) {
        put(out, capture::add_graph(capture::graph(graph)?))
    }

    fn cuGraphExecDestroy[Ctx _c](graph: usize) {
        capture::drop_graph(graph)
    }

    fn cuGraphUpload[Ctx context](graph: usize, handle: usize) {
        capture::graph(graph)?;
        stream::resolve_any(&context, handle)?;
        Ok(())
    }

    fn cuGraphLaunch[Ctx context](graph: usize, handle: usize) {
        let operations = capture::graph(graph)?;
        stream::submit(&stream::resolve_any(&context, handle)?, operations.to_vec())
    }
}

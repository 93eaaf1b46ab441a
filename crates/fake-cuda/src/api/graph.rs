//! Graphs, as far as a capture makes them.

use crate::capture;
use crate::entry::{entries, put};
use crate::stream;

entries! {
    fn cuGraphDestroy[Init _r](graph: usize) {
        capture::drop_graph(graph)
    }

    fn cuGraphInstantiateWithFlags[Init _r](out: *mut usize, graph: usize, _flags: u64) {
        put(out, capture::add_graph(capture::graph(graph)?))
    }

    fn cuGraphExecDestroy[Init _r](graph: usize) {
        capture::drop_graph(graph)
    }

    fn cuGraphUpload[Handle context](graph: usize, handle: usize) {
        capture::graph(graph)?;
        stream::resolve(&context, handle)?;
        Ok(())
    }

    fn cuGraphLaunch[Handle context](graph: usize, handle: usize) {
        let operations = capture::graph(graph)?;
        stream::submit(&stream::resolve(&context, handle)?, operations.to_vec())
    }
}

//! Commands of the kvferry workspace.
fn main() {}

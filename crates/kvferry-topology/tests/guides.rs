//! The scenarios of the guides are sound: who copies one begins with something that runs.

use std::path::Path;

use kvferry_topology::scenario::Scenario;

#[test]
fn every_worked_scenario_is_read_without_a_fault() {
    let guides = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides");
    let files = std::fs::read_dir(&guides).unwrap().map(|entry| entry.unwrap().path());
    let scenarios: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
    assert!(scenarios.len() >= 9, "{scenarios:?}");
    for path in scenarios {
        let name = path.file_stem().unwrap().to_string_lossy();
        if let Err(faults) = Scenario::from_file(&path) {
            panic!("{name}: {faults}");
        }
        // A guide, or a page that speaks of many, tells how to run it.
        let pages = ["simulator.md", "sweep.md", "load.md"].map(|page| format!("docs/{page}"));
        let guide = std::fs::read_dir(&guides).unwrap().map(|entry| entry.unwrap().path());
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut texts = guide.filter(|p| p.extension().is_some_and(|e| e == "md")).chain(pages.map(|p| top.join(p)));
        let told = format!("{name}.toml");
        assert!(texts.any(|page| std::fs::read_to_string(page).unwrap().contains(&told)), "no page speaks of {told}");
    }
}

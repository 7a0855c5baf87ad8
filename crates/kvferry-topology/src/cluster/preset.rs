//! Machines that come along: files like any user's, in `presets/`, with the source of each figure beside it.

/// One of them.
pub(super) struct Preset {
    pub(super) name: &'static str,
    text: &'static str,
}

macro_rules! presets {
    ($($name:literal),* $(,)?) => {
        /// All of them, the most common first.
        pub(super) const PRESETS: &[Preset] = &[
            $(Preset { name: $name, text: include_str!(concat!("../../presets/", $name, ".toml")) }),*
        ];
    };
}

presets!("hgx-h100", "hgx-h200", "gb200-nvl72", "a100-4nic", "tcp-pair", "tcp-pair-8", "local");

pub(super) fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|p| p.name == name).map(|p| p.text)
}

//! One of the deployments that are tried.

use std::fmt;

use kvferry_geometry::layout::LayoutStyle;
use kvferry_models::{EngineDescription, Shape, layout_named};
use serde::Serialize;

use crate::scenario::{Mode, Stream};

/// The parallel sizes that a sweep varies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Sizes {
    /// Tensor parallel.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Decode context parallel.
    pub dcp: u32,
}

impl Sizes {
    /// Those of a shape.
    #[must_use]
    pub fn of(shape: &Shape) -> Self {
        Self { tp: shape.tp, pp: shape.pp, dcp: shape.dcp }
    }

    /// A shape with these sizes and all else as it is.
    #[must_use]
    pub fn on(self, shape: Shape) -> Shape {
        Shape { tp: self.tp, pp: self.pp, dcp: self.dcp, ..shape }
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.on(Shape::default()))
    }
}

/// A layout by its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// As the engine's description has it.
    #[default]
    Own,
    /// Heads outermost.
    Hnd,
    /// Tokens outermost.
    Nhd,
    /// Keys and values apart.
    Planes,
    /// Rows one after the other.
    PackedRows,
}

impl Layout {
    /// All that have a name in a scenario.
    pub const NAMED: [Self; 4] = [Self::Hnd, Self::Nhd, Self::Planes, Self::PackedRows];

    /// As a scenario writes it; empty for [`Own`](Self::Own).
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Own => "",
            Self::Hnd => "hnd",
            Self::Nhd => "nhd",
            Self::Planes => "planes",
            Self::PackedRows => "packed-rows",
        }
    }

    pub(crate) fn style(self) -> Option<LayoutStyle> {
        layout_named(self.name())
    }
}

/// How caches are handed over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// D's ranks read.
    Pull,
    /// P's ranks write when all is computed.
    Push,
    /// P's ranks write layers as they are done, in so many steps.
    PushLayers(u32),
    /// P's ranks write chunks of so many tokens as they are done.
    PushChunks(u64),
}

impl Way {
    /// As `[transfer]` has it.
    #[must_use]
    pub const fn transfer(self) -> (Mode, Stream) {
        match self {
            Self::Pull => (Mode::Pull, Stream::None),
            Self::Push => (Mode::Push, Stream::None),
            Self::PushLayers(steps) => (Mode::Push, Stream::Layers { steps }),
            Self::PushChunks(tokens) => (Mode::Push, Stream::Chunks { tokens }),
        }
    }

    /// That of a transfer.
    #[must_use]
    pub const fn of(mode: Mode, stream: Stream) -> Self {
        match (mode, stream) {
            (_, Stream::Layers { steps }) => Self::PushLayers(steps),
            (_, Stream::Chunks { tokens }) => Self::PushChunks(tokens),
            (Mode::Pull, Stream::None) => Self::Pull,
            (Mode::Push, Stream::None) => Self::Push,
        }
    }

    /// As `modes` writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "push",
            Self::PushLayers(_) => "push+layers",
            Self::PushChunks(_) => "push+chunks",
        }
    }
}

/// All engines of one kind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Engines {
    /// How many.
    pub engines: u32,
    /// The sizes of each.
    pub sizes: Sizes,
    /// Tokens of a block, of those that one rank keeps.
    pub block_size: u32,
    /// Its layout.
    pub layout: Layout,
}

impl Engines {
    /// Puts the sizes into a description.
    pub(crate) fn describe(&self, d: &mut EngineDescription) {
        if self.sizes.pp != d.shape.pp {
            // Stages that are listed are those of another number of them.
            d.stages = None;
        }
        d.shape = self.sizes.on(d.shape);
        d.block_size = self.block_size;
        if let Some(style) = self.layout.style() {
            d.layout = style;
        }
    }

    /// The keys of its table in a scenario.
    fn keys(&self, f: &mut fmt::Formatter<'_>, table: &str, shape: Shape) -> fmt::Result {
        let (shape, engines, block) = (self.sizes.on(shape), self.engines, self.block_size);
        writeln!(f, "[{table}]\nengine = \"{shape}\"\nengines = {engines}\nblock_size = {block}")?;
        match self.layout {
            Layout::Own => Ok(()),
            layout => writeln!(f, "layout = \"{}\"", layout.name()),
        }
    }
}

impl fmt::Display for Engines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} block {}", self.engines, self.sizes, self.block_size)?;
        if self.layout == Layout::Own { Ok(()) } else { write!(f, " {}", self.layout.name()) }
    }
}

/// One deployment: the scenario with these sizes in place of its own. Its name tells all that is different, and no other has it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Candidate {
    /// P's engines.
    pub prefill: Engines,
    /// D's engines.
    pub decode: Engines,
    /// How caches go from one to the other.
    pub way: Way,
}

impl Candidate {
    /// What its engines are, but for their number.
    pub(super) fn pair(&self) -> [(Sizes, u32, Layout); 2] {
        [&self.prefill, &self.decode].map(|e| (e.sizes, e.block_size, e.layout))
    }

    /// Whether its engines are those of another, but for their number: such are judged one after the other.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        self.pair() == other.pair()
    }

    /// What to write into the scenario to simulate this one, `shapes` being those of the scenario's engines.
    #[must_use]
    pub fn keys(&self, shapes: (Shape, Shape)) -> String {
        struct Keys<'a>(&'a Candidate, (Shape, Shape));
        impl fmt::Display for Keys<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.prefill.keys(f, "prefill", self.1.0)?;
                self.0.decode.keys(f, "decode", self.1.1)?;
                let (mode, stream) = self.0.way.transfer();
                writeln!(f, "[transfer]\nmode = \"{}\"", mode.name())?;
                match stream {
                    Stream::None => Ok(()),
                    Stream::Layers { steps } => writeln!(f, "stream = \"layers\"\nsteps = {steps}"),
                    Stream::Chunks { tokens } => writeln!(f, "stream = \"chunks\"\nchunk_tokens = {tokens}"),
                }
            }
        }
        Keys(self, shapes).to_string()
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}, {}", self.prefill, self.decode, self.way.name())
    }
}

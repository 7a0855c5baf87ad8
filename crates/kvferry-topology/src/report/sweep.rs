//! A sweep to look at: tables for a terminal ([`text`]), and a page ([`page`]) that is made as that of an answer is.

mod chart;
mod columns;
mod page;
mod text;

pub use page::page;
pub use text::text;

//! An answer to look at: tables for a terminal ([`text`]), and one page that needs nothing but a browser ([`page`]).
//!
//! Both are functions of the answer alone: no clock, no file, no network. Every name in an answer may come from a user's file, so none
//! reaches a terminal or a page as it is (`figures::clean`).
//!
//! | module | what it draws |
//! |---|---|
//! | `figures` | numbers with units, as all commands write them |
//! | `text` | the tables of the terminal |
//! | `page`, `head`, `tables` | the page: what stands where, what it says in words, its tables |
//! | `data` | what a page embeds, and figures that say where they stand in it |
//! | `axis`, `color`, `plot` | ticks, a scale of colours, and the frame of a chart |
//! | `heat`, `links`, `gantt`, `spread`, `sizes`, `pools` | one chart each |
//! | [`sweep`] | the same for a sweep: tables, and a page |

mod axis;
mod color;
mod data;
mod figures;
mod gantt;
mod head;
mod heat;
mod html;
mod links;
mod page;
mod plot;
mod pools;
mod sizes;
mod spread;
pub mod sweep;
mod tables;
mod text;

pub use page::page;
pub use text::text;

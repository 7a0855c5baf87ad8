//! The UCX backend of kvferry.

mod bell;
mod config;
mod error;
mod lane;
mod part;
mod process;
mod rail;
mod shared;
mod sys;
mod transport;
mod walk;
mod wire;
mod work;

pub use config::{MAX_RAILS, Rail, UcxConfig};
pub use error::UcxError;
pub use transport::{RailInfo, UcxTransport};

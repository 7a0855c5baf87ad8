//! What routers carry: `kv_transfer_params`, references, addresses.

use kvferry::{Address, Reference, TransferParams};

use crate::Reached;

/// A byte for what it is, then the text; bytes that are no UTF-8 are replaced.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let mut reached = Reached::default();
    let Some((what, text)) = data.split_first() else { return reached };
    let text = String::from_utf8_lossy(text);
    match what % 3 {
        0 => params(&text, &mut reached),
        1 => reference(&text, &mut reached),
        _ => address(&text, &mut reached),
    }
    reached
}

/// What is accepted is written, and read as the same.
fn params(text: &str, reached: &mut Reached) {
    match text.parse::<TransferParams>() {
        Ok(params) => {
            reached.at(match params.source() {
                kvferry::Source::None => "no source",
                kvferry::Source::Lost => "lost",
                kvferry::Source::At(_) => "params",
            });
            let written = params.to_string();
            assert_eq!(written.parse::<TransferParams>().as_ref(), Ok(&params), "{written}");
            assert_eq!(TransferParams::from_value(&params.to_value()).as_ref(), Ok(&params), "{written}");
        }
        Err(error) => reached.fault(&error),
    }
}

/// The same text comes back: a reference has one.
fn reference(text: &str, reached: &mut Reached) {
    match text.parse::<Reference>() {
        Ok(reference) => {
            reached.at("reference");
            let written = reference.to_string();
            assert_eq!(written.parse::<Reference>().as_ref(), Ok(&reference), "{written}");
            assert_eq!(text[..74], written[..74], "lease and epoch have one text");
            assert_eq!(TransferParams::of(reference.clone()).source(), kvferry::Source::At(&reference));
        }
        Err(error) => reached.fault(&error),
    }
}

fn address(text: &str, reached: &mut Reached) {
    match text.parse::<Address>() {
        Ok(address) => {
            reached.at(match address {
                Address::Tcp(_) => "tcp",
                Address::Unix(_) => "unix",
                Address::Memory(_) => "memory",
            });
            assert_eq!(address.to_string().parse::<Address>().as_ref(), Ok(&address), "{text:?}");
        }
        Err(error) => reached.fault(&error),
    }
}

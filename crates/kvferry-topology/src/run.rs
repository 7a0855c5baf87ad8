//! Either engine, and the same load handed over in other ways.

use crate::analytic::{self, AnalyticError};
use crate::answer::{Answer, Compared};
use crate::events::{self, EventsError};
use crate::load::Load;
use crate::scenario::{Mode, Scenario, Stream, Transfer};

/// What makes the answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Engine {
    /// Closed form: at once, blind to bursts.
    Analytic,
    /// Discrete events over real sessions.
    #[default]
    Events,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// There are no requests.
    #[error(transparent)]
    Load(#[from] crate::load::LoadErrors),
    /// The closed form has none.
    #[error(transparent)]
    Analytic(#[from] AnalyticError),
    /// The events have none.
    #[error(transparent)]
    Events(#[from] EventsError),
}

/// Answers for a scenario; with `compare` also how the same load fares where caches are handed over in other ways.
///
/// # Errors
/// If there is no load, or the engines don't match.
pub fn run(scenario: &Scenario, engine: Engine, compare: bool) -> Result<Answer, SimError> {
    let load = scenario.requests()?;
    let mut answer = one(scenario, &load, engine)?;
    if compare {
        let own = (scenario.transfer.mode, scenario.transfer.stream);
        let steps = match own.1 {
            Stream::Layers { steps } => steps,
            _ => 8,
        };
        let ways = [(Mode::Pull, Stream::None), (Mode::Push, Stream::None), (Mode::Push, Stream::Layers { steps })];
        for (mode, stream) in ways.into_iter().filter(|way| *way != own) {
            let transfer = Transfer { mode, stream, ..scenario.transfer };
            let other = one(&Scenario { transfer, ..scenario.clone() }, &load, engine)?;
            let of = |name: &str| other.times.iter().find(|t| t.name == name).cloned().unwrap_or_default();
            answer.compared.push(Compared {
                with: match stream {
                    Stream::None => mode.name().to_owned(),
                    _ => format!("{}, stream {}", mode.name(), stream.name()),
                },
                first_token: of("time to first token"),
                handover: of("handover"),
            });
        }
    }
    Ok(answer)
}

fn one(scenario: &Scenario, load: &Load, engine: Engine) -> Result<Answer, SimError> {
    Ok(match engine {
        Engine::Analytic => analytic::analyse_load(scenario, load)?,
        Engine::Events => events::simulate_load(scenario, load)?,
    })
}

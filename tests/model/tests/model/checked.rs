//! A world as stateright takes it.

use std::time::Instant;

use kvferry_model::{Action, Fate, Rule, State, World};
use stateright::{Checker, HasDiscoveries, Model, Property};

/// Wraps what is foreign to both crates.
#[derive(Clone, Debug)]
pub(crate) struct Checked(pub(crate) World);

macro_rules! rules {
    ($($rule:ident)*) => {
        const RULES: [&str; Rule::ALL.len()] = [$(stringify!($rule)),*];

        fn always() -> Vec<Property<Checked>> {
            vec![$(Property::always(stringify!($rule), |m: &Checked, s: &State| s.keeps(Rule::$rule, &m.0))),*]
        }
    };
}

rules! {
    HeldIsHeld HeldOnce LeaseEndsOnce ReleasedByItsReader FreeIsClosed DeliveredIsHeld DeliveredIsRight OneOutcome
    GivenUpIsOver WrittenIsLent StoppedBeforeRetry GrantedIsLent SourceIsKept DrainedBeforeNext AttemptOnce StoppedIsOver
    ClosedIsClosed EndIsNotLater InTime AllEnds
}

impl Model for Checked {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![self.0.first()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.0.actions(state, actions);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        Some(self.0.next(last, &action))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = always();
        all.push(Property::sometimes(DELIVERED, |_, s: &State| s.fates().contains(&Fate::Delivered)));
        all.push(Property::sometimes(FAILED, |_, s: &State| s.fates().contains(&Fate::Failed)));
        all
    }
}

/// Something is delivered in this world.
pub(crate) const DELIVERED: &str = "delivered";
/// Something fails in it.
pub(crate) const FAILED: &str = "failed";

/// Explores a world to its end; gives the number of its states.
pub(crate) fn holds(world: World) -> usize {
    let (name, begun) = (world.name, Instant::now());
    let checker = Checked(world.clone()).checker().spawn_dfs().join();
    if let Some(rule) = RULES.into_iter().find(|rule| checker.discovery(rule).is_some()) {
        // Once more, for the shortest way.
        let until = HasDiscoveries::AllOf([rule].into());
        let checker = Checked(world).checker().finish_when(until).spawn_bfs().join();
        if let Some(path) = checker.discovery(rule) {
            let actions: Vec<String> = path.clone().into_actions().iter().map(|a| format!("{a:?}")).collect();
            panic!("{name}: {rule} is broken by {actions:#?}\nwhich leads to {:#?}", path.last_state());
        }
    }
    let states = checker.unique_state_count();
    for seen in [DELIVERED, FAILED] {
        assert!(checker.discovery(seen).is_some(), "{name}: nothing is {seen} in it");
    }
    println!("{name}: {states} states, {} deep, {:.1} s", checker.max_depth(), begun.elapsed().as_secs_f64());
    states
}

/// Explores a world until this rule is broken.
pub(crate) fn breaks(world: World, rule: Rule) {
    let (name, fault, begun) = (world.name, world.fault, Instant::now());
    let rule = RULES.into_iter().find(|r| *r == format!("{rule:?}")).unwrap();
    let until = HasDiscoveries::AllOf([rule].into());
    let checker = Checked(world).checker().finish_when(until).spawn_bfs().join();
    let states = checker.unique_state_count();
    let Some(path) = checker.discovery(rule) else { panic!("{name}: {fault:?} breaks no {rule} in {states} states") };
    let actions: Vec<String> = path.into_actions().iter().map(|a| format!("{a:?}")).collect();
    let took = begun.elapsed().as_secs_f64();
    println!("{name}, {fault:?}: {rule} is broken, {states} states, {took:.1} s: {}", actions.join(", "));
}

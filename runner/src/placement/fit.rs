//! What a placement takes, by a rehearsal.

use std::sync::Arc;

use crate::engine::{Runtime, Session, SessionConfig};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::models::{self, Decoder};
use crate::placement::{Account, Candidate, Chosen, Limits, Placement, Room, choose, expert_block};

/// What a model and one sequence on it take.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Needs {
    /// The most that the pool holds from the driver, bytes.
    pub reserved_bytes: u64,
    /// What of it is what.
    pub account: Account,
    /// Blocks of the model.
    pub blocks: usize,
    /// Whether they can stay on the host as a whole.
    pub whole_blocks: bool,
    /// Tokens in the sequence at most.
    pub context: usize,
}

/// Loads a model, makes a sequence and goes through its steps without doing any of it, on what
/// [stands in](Runtime::rehearsal) for the runtime's device. `config` says how the sequence is to be.
///
/// # Errors
/// Those of the file and of `config`.
pub fn rehearse(
    file: &Arc<Gguf>,
    runtime: &Runtime,
    placement: &Placement,
    config: &dyn Fn(&Decoder) -> Result<SessionConfig>,
) -> Result<Needs> {
    let stand_in = Arc::new(runtime.rehearsal()?);
    let model = Arc::new(models::load_placed(Arc::clone(file), &stand_in, placement)?);
    let config = config(&model)?;
    let mut session = Session::new(Arc::clone(&stand_in), Arc::clone(&model), config)?;
    session.rehearse()?;
    Ok(Needs {
        reserved_bytes: stand_in.pool().stats().reserved_bytes.peak,
        account: Account::of(&session),
        blocks: model.depth(),
        whole_blocks: model.streams.is_none(),
        context: session.context(),
    })
}

/// A placement that fills the device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Fitted {
    /// What was chosen.
    pub chosen: Chosen,
    /// What that takes.
    pub needs: Needs,
}

/// Chooses a placement for a model and one sequence on it, by rehearsals. Where `config` leaves the context open, it may become
/// as short as `least_context`.
///
/// # Errors
/// Those of [`choose`] and [`rehearse`].
pub fn fit(
    file: &Arc<Gguf>,
    runtime: &Runtime,
    room: &Room,
    least_context: Option<usize>,
    config: &dyn Fn(&Decoder) -> Result<SessionConfig>,
) -> Result<Fitted> {
    let open = std::cell::Cell::new(false);
    let rehearse = |candidate: &Candidate| {
        let config = |model: &Decoder| {
            let mut config = config(model)?;
            open.set(config.context.is_none());
            config.context = candidate.context.or(config.context);
            Ok(config)
        };
        rehearse(file, runtime, &candidate.placement(), &config)
    };
    let whole = rehearse(&Candidate::default())?;
    let with_experts = file.tensors().iter().filter_map(|tensor| expert_block(tensor.name()));
    let limits = Limits {
        blocks: whole.blocks,
        expert_blocks: with_experts.filter(|block| *block < whole.blocks).max().map_or(0, |last| last + 1),
        whole_blocks: whole.whole_blocks,
        context: least_context.filter(|_| open.get()).map(|least| (least.max(1), whole.context)),
    };
    let mut known = vec![(Candidate::default(), whole)];
    let chosen = choose(room, &limits, &mut |candidate| {
        if let Some((_, needs)) = known.iter().find(|(other, _)| other == candidate) {
            return Ok(needs.reserved_bytes);
        }
        let needs = rehearse(candidate)?;
        let bytes = needs.reserved_bytes;
        known.push((*candidate, needs));
        Ok(bytes)
    })?;
    let needs = match known.into_iter().find(|(other, _)| *other == chosen.candidate) {
        Some((_, needs)) => needs,
        None => rehearse(&chosen.candidate)?,
    };
    Ok(Fitted { chosen, needs })
}

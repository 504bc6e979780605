//! Where the parts of a model go: as the flags say, or as there is room for.

use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};

use super::flags::Switch;
use super::output::say;
use super::placement::PlacementFlags;
use super::run::merged;
use super::size::format_size;
use super::split::layers;
use crate::engine::{Runtime, Session, SessionConfig};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::models::{self, Decoder};
use crate::placement::{self, Account, Candidate, Fitted, Needs, Placement, Room};

/// Whether to choose what stays on the host, and how.
#[derive(Debug, Clone, Args)]
pub(super) struct FitFlags {
    /// Choose what stays on the host so that all fits the memory there is: a context that -c leaves open, then experts of the first
    /// layers, then layers (also -fit). What -ngl, -cmoe, -ncmoe or -ot say is only checked. Off by default, other than in llama.cpp:
    /// a run does what its flags say, and short memory is dealt with as it comes
    #[arg(long, value_enum, value_name = "on|off", default_value_t = Switch::Off, num_args = 0..=1, default_missing_value = "on")]
    fit: Switch,
    /// With --fit on: memory to leave free, MiB (also -fitt) [default: 1024, but at most a tenth of what is free]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(0..=1 << 24))]
    fit_target: Option<u64>,
    /// With --fit on: the shortest context to choose where -c leaves it open (also -fitc)
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=i32::MAX as i64))]
    fit_ctx: u32,
}

/// A sequence on a model, to be made.
pub(super) struct Start<'a> {
    pub(super) file: Arc<Gguf>,
    pub(super) runtime: &'a Arc<Runtime>,
    pub(super) config: &'a dyn Fn(&Decoder) -> Result<SessionConfig>,
    /// Whether the context is not to be shortened.
    pub(super) whole_context: bool,
}

impl Start<'_> {
    /// Chooses, loads, and says where what is.
    pub(super) fn go(&self, fit: &FitFlags, given: &PlacementFlags) -> Result<(Session, Value)> {
        let Plan { placement, context, needs, json } = self.plan(fit, given)?;
        let model = Arc::new(models::load_placed(Arc::clone(&self.file), self.runtime, &placement)?);
        let mut config = (self.config)(&model)?;
        config.context = context.or(config.context);
        let session = Session::new(Arc::clone(self.runtime), model, config)?;
        let account = Account::of(&session);
        let account = needs.as_ref().map_or(account, |needs| account.with_scratch_of(&needs.account));
        say(placement::table(&account));
        let layers = layers(session.model(), self.runtime);
        let foretold = needs.map(|needs| needs.reserved_bytes);
        Ok((
            session,
            merged(merged(account.json(), layers), json!({ "reserved_foretold_bytes": foretold, "fit": json })),
        ))
    }

    fn plan(&self, fit: &FitFlags, given: &PlacementFlags) -> Result<Plan> {
        let placement = given.placement_on(self.runtime)?;
        if self.runtime.units().len() > 1 {
            if fit.fit == Switch::On {
                return Err(Error::Unsupported {
                    what: "fitting a model to the memory of several devices",
                    found: format!("-fit on with --devices {}", self.runtime.units().len()),
                    advice: "-ts, -ncmoe and -c, which say what goes where".to_owned(),
                });
            }
            return Ok(Plan { placement, context: None, needs: None, json: Value::Null });
        }
        if fit.fit == Switch::Off {
            // For the table only: a device that can not be stood in for is none of its business.
            let needs = placement::rehearse(&self.file, self.runtime, &placement, self.config);
            let needs = needs.inspect_err(|error| tracing::info!(%error, "not rehearsed")).ok();
            return Ok(Plan { placement, context: None, needs, json: Value::Null });
        }
        let margin = fit.fit_target.map(|mib| mib << 20);
        let room = Room::new(self.runtime.free_bytes()? as u64, margin);
        let least = (!self.whole_context).then_some(fit.fit_ctx as usize);
        let (placement, context, needs, chosen) = if given.is_given() {
            let needs = placement::rehearse(&self.file, self.runtime, &placement, self.config)?;
            say(checked(&room, &needs));
            (placement, None, needs, None)
        } else {
            let Fitted { chosen, needs } = placement::fit(&self.file, self.runtime, &room, least, self.config)?;
            say(told(&room, &chosen));
            (chosen.candidate.placement(), chosen.candidate.context, needs, Some(chosen))
        };
        let candidate = chosen.map(|chosen| chosen.candidate);
        let json = json!({
            "chosen": candidate.map(|candidate| json!({
                "n_cpu_moe": candidate.experts_below,
                "n_gpu_layers": candidate.device_layers,
                "context": needs.context,
            })),
            "fits": room.holds(needs.reserved_bytes),
            "needs_bytes": needs.reserved_bytes,
            "better_needs_bytes": chosen.and_then(|chosen| chosen.better_bytes),
            "free_bytes": room.free_bytes,
            "margin_bytes": room.margin_bytes,
        });
        Ok(Plan { placement, context, needs: Some(needs), json })
    }
}

struct Plan {
    placement: Placement,
    context: Option<usize>,
    needs: Option<Needs>,
    json: Value,
}

/// What the choice is and why.
fn told(room: &Room, chosen: &placement::Chosen) -> String {
    let Candidate { context, experts_below, device_layers } = chosen.candidate;
    let mut parts = Vec::new();
    parts.extend(context.map(|tokens| format!("a context of {tokens} tokens")));
    if experts_below > 0 {
        parts.push(format!("the experts of the first {experts_below} layers on the host"));
    }
    parts.extend(device_layers.map(|layers| format!("the last {layers} layers on the device")));
    let what = if parts.is_empty() { "all of it on the device".to_owned() } else { parts.join(", ") };
    let better =
        chosen.better_bytes.map_or_else(String::new, |bytes| format!("; one step more takes {}", format_size(bytes)));
    format!("fit: {what}: takes {} of {}{better}", format_size(chosen.needs_bytes), free(room))
}

/// How what was asked for compares with what there is.
fn checked(room: &Room, needs: &Needs) -> String {
    let takes = format!("takes {} of {}", format_size(needs.reserved_bytes), free(room));
    if room.holds(needs.reserved_bytes) {
        format!("fit: as the flags say: {takes}")
    } else {
        format!(
            "fit: as the flags say, though that does not fit: {takes}; without -ngl, -cmoe, -ncmoe and -ot it is chosen"
        )
    }
}

fn free(room: &Room) -> String {
    format!("{} free, of which {} are to stay so", format_size(room.free_bytes), format_size(room.margin_bytes))
}

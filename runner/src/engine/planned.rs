//! The steps of a sequence as plans, which are made and not run.

use evergraph_kernels::plan::PlanStep;
use evergraph_pool::driver::DeviceOrdinal;

use super::host::HostSide;
use super::runtime::Runtime;
use super::session::Session;
use super::step::Step;
use crate::error::Result;

/// What a sequence's steps do, where, and after what.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Plans {
    /// Tokens of the step of a prompt.
    pub tokens: usize,
    /// A step of a prompt.
    pub prompt: Vec<PlanStep>,
    /// A step of one token, with the choice of the next.
    pub decode: Vec<PlanStep>,
}

impl Runtime {
    /// The plan of a step that begins and ends on device `home`. Its scratch is taken and given back.
    fn plan_on(
        &self,
        home: DeviceOrdinal,
        side: Option<&HostSide>,
        build: impl Fn(&mut Step<'_>) -> Result<()>,
    ) -> Result<Vec<PlanStep>> {
        let allocate = |device, bytes| {
            let unit = self.unit(device);
            Ok(unit.pool().alloc::<u8>(bytes, unit.stream())?)
        };
        let mut step = Step::new(home, self.config().act, &allocate, side, false);
        build(&mut step)?;
        Ok(step.planned())
    }
}

impl Session {
    /// The plans of a step of a prompt of `tokens` tokens, as far as they fit a step, and of a step of one token. Nothing is run. The
    /// host's own ops are not in them, but the places where it is asked and waited for.
    ///
    /// # Errors
    /// What does not fit about a plan, with the op, its tensors and their devices; those of the pools.
    pub fn plans(&mut self, tokens: usize) -> Result<Plans> {
        let tokens = tokens.clamp(1, self.step_tokens());
        self.reach(tokens)?;
        let (home, side) = (self.home(), self.side());
        let prompt = self.runtime().plan_on(home, side, |step| self.prompt_ops(step, tokens))?;
        let decode = self.runtime().plan_on(home, side, |step| self.decode_ops(step))?;
        Ok(Plans { tokens, prompt, decode })
    }
}

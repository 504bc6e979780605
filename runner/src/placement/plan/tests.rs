#![allow(clippy::unwrap_used)]

use std::cell::Cell;

use super::*;

/// A model that takes for each token of context, each block's rest and each block's experts, and for what is always there.
#[derive(Clone, Copy)]
struct Model {
    blocks: usize,
    with_experts: usize,
    context: usize,
}

const TOKEN: u64 = 1;
const REST: u64 = 1000;
const EXPERTS: u64 = 10_000;
const ALWAYS: u64 = 500;

impl Model {
    fn limits(self, least: Option<usize>) -> Limits {
        let context = least.map(|least| (least, self.context));
        Limits { blocks: self.blocks, expert_blocks: self.with_experts, whole_blocks: true, context }
    }

    fn needs(self, candidate: &Candidate) -> u64 {
        let placement = candidate.placement();
        let context = candidate.context.unwrap_or(self.context) as u64;
        let mut bytes = ALWAYS + context * TOKEN;
        for block in 0..self.blocks {
            if placement.block(block, self.blocks) == Home::Host {
                continue;
            }
            bytes += REST;
            let experts = format!("blk.{block}.ffn_up_exps.weight");
            if block < self.with_experts && placement.matrix(&experts, Home::Device) == Home::Device {
                bytes += EXPERTS;
            }
        }
        bytes
    }

    fn choose(self, free: u64, margin: u64, least: Option<usize>) -> Result<Chosen> {
        let room = Room::new(free, Some(margin));
        choose(&room, &self.limits(least), &mut |candidate| Ok(self.needs(candidate)))
    }
}

const MODEL: Model = Model { blocks: 10, with_experts: 8, context: 5000 };

#[test]
fn what_fits_as_a_whole_is_left_alone() {
    let whole = MODEL.needs(&Candidate::default());
    let chosen = MODEL.choose(whole + 7, 7, Some(256)).unwrap();
    assert_eq!(chosen, Chosen { candidate: Candidate::default(), needs_bytes: whole, better_bytes: None });
    // A byte less, and something has to go.
    assert_ne!(MODEL.choose(whole + 6, 7, Some(256)).unwrap().candidate, Candidate::default());
}

#[test]
fn an_open_context_goes_first_then_experts_then_layers() {
    let whole = MODEL.needs(&Candidate::default());
    let of = |less: u64, least| MODEL.choose(whole - less, 0, least).unwrap().candidate;
    let candidate = of(1000, Some(1024));
    assert_eq!((candidate.experts_below, candidate.device_layers), (0, None));
    assert_eq!(candidate.context, Some(1024 + 11 * 256));
    // Not open: experts instead.
    assert_eq!(of(1000, None), Candidate { experts_below: 1, ..Candidate::default() });
    // Open, but not enough.
    let candidate = of(4000, Some(1024));
    assert_eq!(candidate, Candidate { context: Some(1024), experts_below: 1, device_layers: None });
    // All experts and more: what is left of the device are the last layers.
    let candidate = of(8 * EXPERTS + 2 * REST, None);
    assert_eq!(candidate, Candidate { context: None, experts_below: 8, device_layers: Some(9) });
}

#[test]
fn the_choice_is_the_largest_that_fits() {
    for model in [MODEL, Model { with_experts: 0, ..MODEL }, Model { blocks: 1, with_experts: 1, context: 1 }] {
        let whole = model.needs(&Candidate::default());
        for free in (0..=whole).step_by(97) {
            let room = Room::new(free, None);
            let runs = Cell::new(0);
            let chosen = choose(&room, &model.limits(None), &mut |candidate| {
                runs.set(runs.get() + 1);
                Ok(model.needs(candidate))
            });
            assert!(runs.get() <= 10, "{} rehearsals", runs.get());
            let Ok(chosen) = chosen else {
                let least = Candidate { device_layers: Some(0), experts_below: model.with_experts, context: None };
                assert!(!room.holds(model.needs(&least)), "{free}");
                continue;
            };
            assert_eq!(chosen.needs_bytes, model.needs(&chosen.candidate));
            assert!(room.holds(chosen.needs_bytes), "{free}: {chosen:?}");
            let Candidate { experts_below, device_layers, .. } = chosen.candidate;
            let better = match (experts_below, device_layers) {
                (0, None) => continue,
                (_, None) => Candidate { experts_below: experts_below - 1, ..chosen.candidate },
                (_, Some(layers)) => Candidate { device_layers: Some(layers + 1), ..chosen.candidate },
            };
            assert!(!room.holds(model.needs(&better)), "{free}: {better:?} fits too");
            assert_eq!(chosen.better_bytes, Some(model.needs(&better)), "{free}");
        }
    }
}

#[test]
fn what_never_fits_is_an_error_with_numbers() {
    let error = MODEL.choose(5000, 100, None).unwrap_err();
    let Error::NoPlacement { needed_bytes, free_bytes, margin_bytes } = error else { panic!("{error}") };
    assert_eq!((needed_bytes, free_bytes, margin_bytes), (ALWAYS + 5000, 5000, 100));
    assert!(error.to_string().contains("--mem-limit"));
    // Blocks that can not go as a whole stay.
    let limits = Limits { whole_blocks: false, ..MODEL.limits(None) };
    let mut tried = Vec::new();
    let error = choose(&Room::new(5000, Some(100)), &limits, &mut |candidate| {
        tried.push(*candidate);
        Ok(MODEL.needs(candidate))
    });
    let least = MODEL.needs(&Candidate { experts_below: 8, ..Candidate::default() });
    assert!(matches!(error, Err(Error::NoPlacement { needed_bytes, .. }) if needed_bytes == least));
    assert!(tried.iter().all(|candidate| candidate.device_layers.is_none()), "{tried:?}");
    // Errors of a rehearsal end the search.
    let failed = choose(&Room::new(0, None), &MODEL.limits(None), &mut |_| Err(Error::CheckFailed("no".to_owned())));
    assert!(matches!(failed, Err(Error::CheckFailed(_))));
}

#[test]
fn a_margin_is_a_gibibyte_but_no_more_than_a_tenth() {
    assert_eq!(Room::new(80 << 30, None).margin_bytes, 1 << 30);
    assert_eq!(Room::new(1 << 30, None).margin_bytes, (1 << 30) / 10);
    assert_eq!(Room::new(1 << 30, Some(0)).margin_bytes, 0);
    assert!(!Room::new(u64::MAX, Some(1)).holds(u64::MAX));
}

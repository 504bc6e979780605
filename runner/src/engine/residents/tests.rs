#![allow(clippy::unwrap_used)]

use super::*;

const BYTES: usize = 100;

/// Tokens that choose experts of one block by weight, eight of them each, counted as the device does.
struct Tokens {
    state: u64,
    weights: Vec<u64>,
    counts: Vec<i32>,
}

impl Tokens {
    fn new(weights: Vec<u64>) -> Self {
        Self { state: 1, counts: vec![0; weights.len()], weights }
    }

    fn next(&mut self, below: u64) -> u64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % below
    }

    fn run(&mut self, tokens: usize) {
        for _ in 0..tokens {
            let mut left = self.weights.clone();
            for _ in 0..8 {
                let mut place = self.next(left.iter().sum());
                let chosen = left.iter().position(|&weight| {
                    let here = place < weight;
                    place = place.wrapping_sub(if here { 0 } else { weight });
                    here
                });
                let chosen = chosen.unwrap();
                left[chosen] = 0;
                self.counts[chosen] += 1;
            }
        }
    }
}

/// So many changes, 64 tokens before each; how many experts came in each.
fn changes(residents: &mut Residents, tokens: &mut Tokens, times: usize) -> Vec<usize> {
    (0..times)
        .map(|_| {
            tokens.run(64);
            let (swaps, halved) = residents.change(&tokens.counts);
            tokens.counts = halved.unwrap_or_else(|| tokens.counts.clone());
            swaps.len()
        })
        .collect()
}

#[test]
fn experts_that_are_used_most_come_and_stay() {
    // Every eighth is used ten times as often as the others.
    let mut tokens = Tokens::new((0..128).map(|expert| if expert % 8 == 5 { 10 } else { 1 }).collect());
    let mut residents = Residents::new([(16, 128, BYTES)], 6 * BYTES);
    let came = changes(&mut residents, &mut tokens, 8);
    assert!(came.iter().all(|&swaps| swaps <= 6), "no more than bytes go: {came:?}");
    let mut kept = residents.experts();
    kept.sort_unstable();
    assert_eq!(kept, (0..16).map(|index| index * 8 + 5).collect::<Vec<i32>>());
    assert_eq!(changes(&mut residents, &mut tokens, 40).iter().sum::<usize>(), 0, "they stay");
    // Others are used now: they take the places.
    tokens.weights.rotate_right(1);
    changes(&mut residents, &mut tokens, 24);
    let moved = residents.experts().iter().filter(|&&expert| expert % 8 == 6).count();
    assert_eq!(moved, 16);
}

#[test]
fn experts_that_are_used_alike_do_not_take_each_others_places() {
    let mut tokens = Tokens::new(vec![1; 128]);
    let mut residents = Residents::new([(32, 128, BYTES)], 1 << 20);
    let came: usize = changes(&mut residents, &mut tokens, 100).iter().sum();
    assert!(came < 60, "{came} experts came in 100 changes");
}

#[test]
fn of_equal_ones_the_first_come_in_place_of_the_first() {
    let mut residents = Residents::new([(2, 6, BYTES), (2, 6, BYTES)], 3 * BYTES);
    let counts = [0, 0, 40, 50, 40, 40, 0, 30, 50, 50, 0, 0];
    let swap = |block, slot, expert| Swap { block, slot, expert };
    let (swaps, halved) = residents.change(&counts);
    assert_eq!(swaps, [swap(0, 0, 3), swap(1, 0, 2), swap(0, 1, 2)], "and no more than three");
    assert_eq!((residents.experts(), halved), (vec![3, 2, 2, 1], None));
    assert_eq!(residents.table(), [-1, -1, 1, 0, -1, -1, -1, 1, 0, -1, -1, -1]);
    // 50 is not clearly more than 30, and 40 no more than 40.
    assert_eq!(residents.change(&counts).0, []);
    // One that is larger than the limit comes alone.
    let mut residents = Residents::new([(2, 6, BYTES)], 1);
    assert_eq!(residents.change(&counts[..6]).0, [swap(0, 0, 3)]);
    assert_eq!(residents.change(&counts[..6]).0, [swap(0, 1, 2)]);
}

#[test]
fn counts_are_halved_in_time_and_every_choice_is_told_once() {
    let mut residents = Residents::new([(1, 3, BYTES)], BYTES);
    assert_eq!(residents.change(&[3, 1, 0]), (vec![], None));
    assert_eq!(residents.note(&[5, 1, 1]), ExpertTally { chosen: 7, hits: 5, came: 0 });
    assert_eq!(residents.change(&[5, 1, 1]), (vec![], None));
    assert_eq!(residents.change(&[6, 1, 2]), (vec![], None));
    assert_eq!(residents.change(&[7, 1, 2]), (vec![], Some(vec![3, 0, 1])));
    assert_eq!(residents.note(&[4, 0, 2]), ExpertTally { chosen: 12, hits: 8, came: 0 });
    // All are there: none can come.
    let mut residents = Residents::new([(3, 3, BYTES)], BYTES);
    assert_eq!(residents.change(&[0, 0, 1000]).0, []);
    assert_eq!(residents.table(), [0, 1, 2]);
}

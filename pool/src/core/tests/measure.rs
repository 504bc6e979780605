//! Placement measured: how tight, and (in release, by hand) how fast.

use super::*;

/// xorshift64*: the same churn everywhere.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Log-uniform in `[low, high)`.
    fn size(&mut self, low: f64, high: f64) -> u64 {
        let unit = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        (low.ln() + unit * (high.ln() - low.ln())).exp() as u64
    }
}

struct Churn {
    heap: Heap,
    live: Vec<(BlockKey, u64)>,
    rng: Rng,
    now: u64,
    requested: u64,
    peak_requested: u64,
    high: f64,
}

impl Churn {
    fn new(live: usize, high: u64, seed: u64) -> Self {
        let mut churn = Self {
            heap: vmm_heap(1 << 40, 2 * MIB),
            live: Vec::new(),
            rng: Rng(seed),
            now: 0,
            requested: 0,
            peak_requested: 0,
            high: high as f64,
        };
        for _ in 0..live {
            let bytes = churn.rng.size(512.0, churn.high);
            let block = alloc(&mut churn.heap, bytes, A);
            churn.live.push((block, bytes));
            churn.requested += bytes;
        }
        churn
    }

    fn step(&mut self) {
        let at = (self.rng.next() % self.live.len() as u64) as usize;
        self.now += 1;
        self.heap.free(self.live[at].0, Uses::one(A), Stamp(self.now)).unwrap();
        self.requested -= self.live[at].1;
        let bytes = self.rng.size(512.0, self.high);
        self.live[at] = (alloc(&mut self.heap, bytes, A), bytes);
        self.requested += bytes;
        self.peak_requested = self.peak_requested.max(self.requested);
    }

    fn ratio(&self) -> f64 {
        self.heap.backed_bytes() as f64 / self.peak_requested as f64
    }
}

/// Best and median of many short batches: others share the machine.
fn batches(count: usize, steps: usize, mut step: impl FnMut()) -> (f64, f64) {
    let mut ns: Vec<f64> = (0..count)
        .map(|_| {
            let start = std::time::Instant::now();
            (0..steps).for_each(|_| step());
            start.elapsed().as_nanos() as f64 / steps as f64
        })
        .collect();
    ns.sort_by(f64::total_cmp);
    (ns[0], ns[count / 2])
}

#[test]
#[ignore = "a measurement: run in release with --nocapture"]
fn measure_churn() {
    let mut rng = Rng(7);
    let mut sum = 0;
    let sizes = batches(200, 1000, || sum += rng.size(512.0, std::hint::black_box(8e6)) + rng.next() % 5000);
    println!("the random numbers alone: best {:.0} median {:.0} ns ({sum})", sizes.0, sizes.1);
    for (live, high) in [(100, MIB), (1000, 8 * MIB), (5000, 8 * MIB)] {
        for seed in [1, 2, 3, 4, 5, 6] {
            let mut churn = Churn::new(live, high, 0x9e37_79b9 + seed);
            let mut report = String::new();
            for _ in 0..2 {
                let (best, median) = batches(100, 1000, || churn.step());
                report += &format!(" best {best:.0} median {median:.0} ns, {:.4}", churn.ratio());
            }
            churn.heap.check().unwrap();
            let stats = churn.heap.stats();
            println!("{live} live:{report}; {} free blocks, {} MiB", stats.free_blocks, stats.free_bytes >> 20);
        }
    }
}

#[test]
#[ignore = "a measurement: run in release with --nocapture"]
fn measure_pair() {
    for bytes in [512, 64 << 10, MIB, 64 * MIB] {
        let mut heap = vmm_heap(1 << 40, 2 * MIB);
        let _keep = alloc(&mut heap, 3000, A);
        let mut now = 0;
        let (best, median) = batches(100, 10_000, || {
            now += 1;
            let request = heap.request(std::hint::black_box(bytes), 0).unwrap();
            let block = heap.alloc(&request, A).unwrap_or_else(|| alloc(&mut heap, bytes, A));
            heap.free(std::hint::black_box(block), Uses::one(A), Stamp(now)).unwrap();
        });
        println!("pair {bytes}: best {best:.1} median {median:.1} ns");
    }
}

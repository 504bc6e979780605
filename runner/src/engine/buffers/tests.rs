#![allow(clippy::unwrap_used)]

use evergraph_kernels::ops::Fill;

use super::*;
use crate::engine::{Runtime, RuntimeConfig, StepKey};

#[test]
fn counters_are_zeros_of_the_device_and_no_more_than_there_are() {
    let runtime = Runtime::host(RuntimeConfig { strict: true, ..RuntimeConfig::default() }).unwrap();
    let counters = Buffers::counters(&runtime.units()[0]).unwrap();
    let out = Buffer::<f32>::new(&runtime.units()[0], "out", QuantType::F32, &[1]).unwrap();
    let mut found = vec![7; COUNTERS];
    runtime.stream().download_into(&counters.slice, &mut found).unwrap();
    assert!(found.iter().all(|&count| count == 0));
    let uses: [(&dyn Tracked, Use); 2] = [(&counters.slice, Use::State), (&out.slice, Use::State)];
    let key = StepKey { session: 3, what: "count", shape: [0; 3] };
    let step = runtime.step(key, &uses, &[], |step| {
        assert!(step.counters(1)?.is_none(), "a step that was given none");
        step.count_in(&counters.view);
        let [few, all] = [5, COUNTERS].map(|count| step.counters(count).unwrap().unwrap());
        assert_eq!((few.shape(), all.shape()), (&[5][..], &[COUNTERS][..]));
        assert!(few.overlaps(&all), "ops share them");
        assert!(step.counters(COUNTERS + 1)?.is_none() && step.counters(0)?.is_none());
        step.push(Fill { x: out.view.clone(), value: 1.0 })
    });
    let _ = step.unwrap();
}

//! Pool memory in cudarc's own calls.

use cudarc::driver::{LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use evergraph_graphcache::{CacheConfig, CacheError, GraphCache, GraphKey, Ran, Request};
use evergraph_pool::driver::cuda::interop::Interop;
use evergraph_pool::{Purpose, Use};

use super::rig::Rig;
use super::{Story, Told};

pub(crate) const STORIES: &[Story] = &[
    ("a_slice_is_an_argument_of_cudarcs_launch", a_slice_is_an_argument_of_cudarcs_launch),
    ("views_copy", views_copy),
];

/// A user's own module, launched by cudarc inside a cached graph.
fn a_slice_is_an_argument_of_cudarcs_launch(rig: &Rig) -> Told {
    const N: usize = 1000;
    let interop = Interop::new(&rig.stream).unwrap();
    let kernel =
        interop.context().load_module(Ptx::from_binary(rig.cubin.clone())).unwrap().load_function("scale").unwrap();
    let x = rig.pool.upload(&[1.5f32; N], Purpose::State, &rig.stream).unwrap();
    let y = rig.pool.upload(&[0f32; N], Purpose::State, &rig.stream).unwrap();
    let launch = || {
        let (factor, n) = (2.0f32, N as u32);
        let mut launch = interop.stream().launch_builder(&kernel);
        launch.arg(&y).arg(&x).arg(&factor).arg(&n);
        // SAFETY: the kernel takes these arguments.
        unsafe { launch.launch(LaunchConfig::for_num_elems(N as u32)) }.unwrap();
    };
    let graph = rig.capture(launch);
    rig.expect(graph, &[&x, &y]);
    let (cache, key) = (GraphCache::new(CacheConfig::default().strict(true)), GraphKey::new("scale"));
    for (turn, expected) in
        [Ran::WarmUp, Ran::WarmUp, Ran::Captured, Ran::Replayed, Ran::Replayed].into_iter().enumerate()
    {
        rig.stream.upload(&[turn as f32; N], &x).unwrap();
        let request = Request::new(&key, &rig.pool, &rig.stream);
        let outcome = cache.run(&request, |scope| -> Result<(), CacheError> {
            scope.declare(&x, Use::Input)?;
            scope.declare(&y, Use::State)?;
            launch();
            Ok(())
        });
        assert_eq!(outcome.unwrap().ran, expected);
        assert_eq!(rig.stream.download(&y).unwrap(), [2.0 * turn as f32; N]);
    }
    Ok(())
}

/// cudarc's copies take views, on their own stream and on another.
fn views_copy(rig: &Rig) -> Told {
    let interop = Interop::new(&rig.stream).unwrap();
    let mut a = rig.pool.upload(&[1u32; 64], Purpose::State, &rig.stream).unwrap();
    let b = rig.pool.upload(&[2u32; 64], Purpose::State, &rig.stream).unwrap();
    let ours = interop.stream();
    assert_eq!(ours.clone_dtoh(&interop.view(&b).unwrap()).unwrap(), [2; 64]);
    {
        let from = interop.view(&b).unwrap();
        let mut to = interop.view_mut(&mut a).unwrap();
        ours.memcpy_dtod(&from, &mut to).unwrap();
    }
    assert_eq!(rig.stream.download(&a).unwrap(), [2; 64]);
    let theirs = interop.context().new_stream().unwrap();
    rig.stream.fill(&a, 7).unwrap();
    assert_eq!(theirs.clone_dtoh(&interop.view(&a).unwrap()).unwrap(), [0x0707_0707; 64]);
    theirs.memset_zeros(&mut interop.view_mut(&mut a).unwrap()).unwrap();
    assert_eq!(rig.stream.download(&a).unwrap(), [0; 64]);
    interop.context().check_err().unwrap();
    Ok(())
}

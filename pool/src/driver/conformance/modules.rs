//! Stories of modules and launches.
#![allow(unsafe_code)]

use super::rig::{kind, refused};
use super::stories;
use crate::driver::{Args, DriverErrorKind, FunctionHandle, LaunchConfig, ModuleHandle, ModuleImage};

stories! { in modules as conformance_modules;

    /// A function is found by name, always under the same handle, with its layout.
    fn a_function_is_found_by_name(rig) {
        let add = rig.function("add");
        assert_eq!(rig.function("add"), add);
        assert_ne!(rig.function("add_wide"), add);
        let layout = rig.driver.param_layout(add).unwrap().unwrap();
        assert_eq!((layout.params.len(), layout.packed_bytes()), (4, 24));
        assert_eq!(kind(rig.driver.function(rig.module, "nothing")), DriverErrorKind::NotFound);
        if rig.tracks_handles() {
            assert!(matches!(kind(rig.driver.function(ModuleHandle(3), "add")), DriverErrorKind::InvalidHandle(_)));
        }
        refused(rig.driver.module_load(ModuleImage::Binary(b"\0")));
    }

    /// Arguments of another length, an empty grid, an oversized block: refused before anything runs.
    fn a_misshapen_launch_is_refused(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        let args = { let mut args = Args::new(); args.ptr(ptr).u32(4).u32(1); args };
        let launch = |config: LaunchConfig, args: &[u8]| {
            // SAFETY: the host device checks arguments and spans.
            unsafe { rig.driver.launch_kernel(rig.function("fill"), &config, args, stream) }
        };
        let fine = LaunchConfig::linear(1, 1);
        refused(launch(fine, &args.as_bytes()[..12]));
        refused(launch(fine, &[args.as_bytes(), &[0; 8]].concat()));
        refused(launch(fine, &[]));
        refused(launch(LaunchConfig { grid: [0, 1, 1], ..fine }, args.as_bytes()));
        refused(launch(LaunchConfig { block: [1, 0, 1], ..fine }, args.as_bytes()));
        refused(launch(LaunchConfig { block: [32, 32, 2], ..fine }, args.as_bytes()));
        refused(launch(LaunchConfig { block: [u32::MAX; 3], ..fine }, args.as_bytes()));
        refused(launch(LaunchConfig { grid: [1, 1 << 16, 1], ..fine }, args.as_bytes()));
        refused(launch(LaunchConfig { shared_bytes: 1 << 20, ..fine }, args.as_bytes()));
        rig.wait(stream);
        assert_eq!(rig.read(ptr, 4), [0; 4]);
        launch(fine, args.as_bytes()).unwrap();
        rig.wait(stream);
        assert_eq!(rig.read(ptr, 4), [1; 4]);
    }

    /// Functions go with their module; a handle comes back as another function's.
    fn a_function_goes_with_its_module(rig) {
        let stream = rig.stream();
        let module = rig.driver.module_load(rig.other_kernels()).unwrap();
        let gone = rig.driver.function(module, "add").unwrap();
        rig.driver.module_unload(module).unwrap();
        let launch = |function: FunctionHandle, args: &Args| {
            // SAFETY: the host device checks arguments and spans.
            unsafe { rig.driver.launch_kernel(function, &LaunchConfig::linear(1, 1), args.as_bytes(), stream) }
        };
        let ptr = rig.words(4, 5);
        let args = { let mut args = Args::new(); args.ptr(ptr).ptr(ptr).u32(4).u32(1); args };
        assert!(matches!(kind(launch(gone, &args)), DriverErrorKind::InvalidHandle(_)));
        assert!(matches!(kind(rig.driver.module_unload(module)), DriverErrorKind::InvalidHandle(_)));
        let again = rig.driver.module_load(rig.kernels()).unwrap();
        assert_eq!(again, module);
        let other = rig.driver.function(again, "add").unwrap();
        assert_eq!(other, gone);
        launch(gone, &args).unwrap();
        rig.wait(stream);
        assert_eq!(rig.read(ptr, 4), [6; 4]);
    }

    /// A graph holds function handles, not modules: unload the module, and a replay is a fault.
    fn a_replay_of_an_unloaded_function_is_a_fault(rig) {
        let stream = rig.stream();
        let ptr = rig.words(4, 0);
        let exec = rig.exec(stream, || rig.fill(ptr, 4, 1, stream));
        rig.replay(exec, stream);
        rig.driver.module_unload(rig.module).unwrap();
        rig.driver.launch(exec, stream).unwrap();
        rig.expect_fault(stream, "fill", "module was unloaded");
    }

    /// A module of one device is not a module of another.
    fn modules_belong_to_their_device(rig) {
        let function = rig.function("fill");
        rig.peer.bind().unwrap();
        assert!(matches!(kind(rig.peer.function(rig.module, "fill")), DriverErrorKind::InvalidHandle(_)));
        assert!(matches!(kind(rig.peer.param_layout(function)), DriverErrorKind::InvalidHandle(_)));
        assert!(matches!(kind(rig.peer.module_unload(rig.module)), DriverErrorKind::InvalidHandle(_)));
        rig.driver.bind().unwrap();
        assert_eq!(rig.function("fill"), function);
    }
}

//! One suite over every body of the driver traits: each rule of the driver is a story.
//!
//! Test support, behind the feature `conformance`. `driver_conformance!(name, body)` writes a module of tests.

#![allow(clippy::unwrap_used)]

pub mod captures;
pub mod events;
pub mod faults;
pub mod graphs;
mod hardware;
pub mod kernels;
pub mod memory;
pub mod modules;
pub mod peers;
pub mod rig;
pub mod streams;
pub mod updates;

pub use hardware::{SOURCES, not_virtual, untold};
pub use kernels::KERNELS;
pub use rig::{Body, Rig, set_cuda_images};

/// A story and its name.
pub type Story = (&'static str, fn(&Rig));

/// Every story, in the order of the files.
pub fn all_stories() -> impl Iterator<Item = Story> {
    let files = [
        memory::STORIES,
        faults::STORIES,
        streams::STORIES,
        events::STORIES,
        captures::STORIES,
        graphs::STORIES,
        updates::STORIES,
        modules::STORIES,
        peers::STORIES,
    ];
    files.into_iter().flatten().copied()
}

/// Declares the stories of a file: a function each, and an exported macro that turns them into tests.
macro_rules! stories {
    (in $file:ident as $tests:ident; $($(#[$doc:meta])* fn $name:ident($rig:ident) $body:block)*) => {
        $($(#[$doc])* pub fn $name($rig: &$crate::driver::conformance::Rig) $body)*

        /// The stories of this file, by name.
        pub const STORIES: &[$crate::driver::conformance::Story] = &[$((stringify!($name), $name)),*];

        /// Writes the stories of this file as tests over one body.
        #[macro_export]
        #[doc(hidden)]
        macro_rules! $tests {
            ($on:expr) => {$(
                #[test]
                fn $name() {
                    if let Some(why) = $crate::driver::conformance::not_virtual($on, stringify!($name)) {
                        println!("skipped: {why}");
                        return;
                    }
                    $crate::driver::conformance::$file::$name(&$crate::driver::conformance::Rig::new($on));
                }
            )*};
        }
    };
}
pub(crate) use stories;

/// Writes a module of tests: every story over one [`Body`].
#[macro_export]
macro_rules! driver_conformance {
    ($name:ident, $body:expr) => {
        mod $name {
            use $crate::driver::conformance::Body;
            $crate::conformance_memory!($body);
            $crate::conformance_faults!($body);
            $crate::conformance_streams!($body);
            $crate::conformance_events!($body);
            $crate::conformance_captures!($body);
            $crate::conformance_graphs!($body);
            $crate::conformance_updates!($body);
            $crate::conformance_modules!($body);
            $crate::conformance_peers!($body);
        }
    };
}

//! Copies from one device to another.

use evergraph_pool::driver::StreamHandle;

use crate::host::HOST;
use crate::ops::{Op, TensorView};
use crate::{KernelError, Kernels};

/// `dst = src`, byte by byte, from one device to another; runs on the device that is written.
#[derive(Clone, Debug)]
pub struct PeerCopy {
    /// On one device, without gaps.
    pub src: TensorView,
    /// On another, without gaps; of the same type and shape.
    pub dst: TensorView,
}

impl Op for PeerCopy {
    fn name(&self) -> &'static str {
        "peer_copy"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.src]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.dst]
    }

    fn crosses(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), KernelError> {
        let (src, dst) = (&self.src, &self.dst);
        let layout = |tensor: &TensorView, what| KernelError::Layout {
            op: "peer_copy",
            tensor: format!("{tensor:?} of {}", tensor.root().name),
            what,
        };
        if src.ty() != dst.ty() || src.shape() != dst.shape() {
            return Err(layout(dst, "it is of another type or shape than what is copied there"));
        }
        if let Some(tensor) = [src, dst].into_iter().find(|tensor| !tensor.is_contiguous()) {
            return Err(layout(tensor, "it has gaps"));
        }
        if let Some(tensor) = [src, dst].into_iter().find(|tensor| tensor.root().device == HOST) {
            return Err(layout(tensor, "it is on the host"));
        }
        if src.root().device == dst.root().device {
            return Err(layout(dst, "it is on the device that it is copied from"));
        }
        Ok(())
    }

    fn enqueue(&self, kernels: &Kernels, stream: StreamHandle) -> Result<(), KernelError> {
        let (driver, src, dst) = (kernels.driver(), &self.src, &self.dst);
        driver.bind()?;
        let bytes = src.range().len();
        Ok(driver.memcpy_peer(dst.ptr(), dst.root().device, src.ptr(), src.root().device, bytes, stream)?)
    }
}

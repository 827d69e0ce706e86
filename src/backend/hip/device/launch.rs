//! The parts of a launch: its shape, and its arguments in slots. `driver::checked` launches.

/// Most arguments per kernel.
pub const MAX_ARGUMENTS: usize = 48;

/// Threads per workgroup by default.
pub const WORKGROUP: u32 = 256;

/// Arguments of a launch: 8 bytes each, however short.
#[derive(Debug)]
pub struct Slots {
    slots: [u64; MAX_ARGUMENTS],
    used: usize,
}

impl Default for Slots {
    fn default() -> Self {
        Self { slots: [0; MAX_ARGUMENTS], used: 0 }
    }
}

impl Slots {
    /// Appends an argument. The declaration of a kernel with too many arguments does not compile.
    pub fn push(&mut self, bits: u64) {
        if let Some(slot) = self.slots.get_mut(self.used) {
            *slot = bits;
            self.used += 1;
        }
    }
}

impl AsMut<[u64]> for Slots {
    fn as_mut(&mut self) -> &mut [u64] {
        &mut self.slots[..self.used]
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Workgroups: x, y, z.
    pub workgroups: [u32; 3],
    /// Threads per workgroup, a multiple of the wave size.
    pub threads: u32,
    /// Bytes of dynamic LDS per workgroup.
    pub lds_bytes: u32,
}

impl Grid {
    /// This many workgroups of [`WORKGROUP`] threads.
    pub const fn x(workgroups: u32) -> Self {
        Self::xyz(workgroups, 1, 1)
    }

    /// Workgroups in two dimensions.
    pub const fn xy(x: u32, y: u32) -> Self {
        Self::xyz(x, y, 1)
    }

    /// Workgroups in three dimensions.
    pub const fn xyz(x: u32, y: u32, z: u32) -> Self {
        Self { workgroups: [x, y, z], threads: WORKGROUP, lds_bytes: 0 }
    }

    /// Sets the threads per workgroup.
    #[must_use]
    pub const fn threads(self, threads: u32) -> Self {
        Self { threads, ..self }
    }

    /// Sets the bytes of dynamic LDS.
    #[must_use]
    pub const fn lds(self, lds_bytes: u32) -> Self {
        Self { lds_bytes, ..self }
    }

    /// Why a device with these limits cannot launch this grid; `None` when it can.
    pub(super) fn fault(&self, wave: u32, threads_max: u32, lds_max: u32) -> Option<String> {
        // Limits of all runtimes: y and z as in CUDA, and x * threads within HIP's 32 bits.
        const YZ_MAX: u32 = 65535;
        let Self { workgroups: [x, y, z], threads, lds_bytes } = *self;
        if x == 0 || y == 0 || z == 0 || threads == 0 {
            return Some(format!("nothing to run: {x} x {y} x {z} workgroups of {threads} threads"));
        }
        if y > YZ_MAX
            || z > YZ_MAX
            || x > i32::MAX as u32
            || u64::from(x) * u64::from(threads) > u32::MAX.into()
        {
            return Some(format!("too many workgroups: {x} x {y} x {z} of {threads} threads"));
        }
        if threads > threads_max || wave == 0 || !threads.is_multiple_of(wave) {
            return Some(format!(
                "{threads} threads per workgroup must be a multiple of {wave} and at most {threads_max}"
            ));
        }
        (lds_bytes > lds_max).then(|| format!("{lds_bytes} bytes of LDS requested, the device has {lds_max}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_no_device_takes_are_refused() {
        let fault = |grid: Grid| grid.fault(64, 1024, 65536);
        assert_eq!(fault(Grid::x(1)), None);
        assert_eq!(fault(Grid::xyz(8_388_607, 65535, 65535).lds(65536)), None);
        for grid in [
            Grid::x(0),
            Grid::xy(1, 0),
            Grid::xy(1, 65536),
            Grid::xyz(1, 1, 65536),
            Grid::x(1 << 24),
            Grid::x(u32::MAX),
            Grid::x(1).threads(0),
            Grid::x(1).threads(96),
            Grid::x(1).threads(1088),
            Grid::x(1).lds(65537),
        ] {
            assert!(fault(grid).is_some(), "{grid:?}");
        }
    }
}

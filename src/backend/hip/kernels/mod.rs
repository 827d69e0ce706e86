//! The kernels as Rust knows them: each declared once, name and arguments; the code is in `kernels/*.hip`.
//!
//! `cargo xtask kernels` compares [`declared`] with the metadata of the built code objects: every kernel there, every
//! argument of the same size at the same place.

pub mod matmul;
pub mod ops;
pub mod probe;

use std::marker::PhantomData;

use super::launch::Slots;
use super::pointer::DevicePtr;

/// A kernel by name that takes arguments `A`.
#[derive(Debug)]
pub struct Kernel<A> {
    name: &'static str,
    of: PhantomData<fn(&A)>,
}

impl<A: Arguments> Kernel<A> {
    /// Only the macro makes them: a name without a declaration would escape the check.
    const fn new(name: &'static str) -> Self {
        Self { name, of: PhantomData }
    }

    /// Its name in the code object.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

// By hand: derived ones would ask the same of `A`.
impl<A> Clone for Kernel<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Kernel<A> {}

/// How an argument is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentKind {
    /// An address in device memory: `global_buffer` in the metadata.
    Pointer,
    /// A number: `by_value` in the metadata.
    Value,
}

/// One argument of a kernel as the code object's metadata has to describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Its name in Rust.
    pub name: &'static str,
    /// Pointer or number.
    pub kind: ArgumentKind,
    /// Bytes from the start of the arguments.
    pub offset: usize,
    /// Its bytes.
    pub size: usize,
}

/// A kernel's name and arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Name in the code object.
    pub name: &'static str,
    /// In order.
    pub arguments: &'static [Argument],
}

/// Every kernel there has to be in a code object.
pub fn declared() -> impl Iterator<Item = Declaration> {
    matmul::DECLARED.iter().chain(ops::DECLARED).chain(probe::DECLARED).copied()
}

/// Arguments of a kernel: a struct made by `kernels!`.
pub trait Arguments {
    /// As the code object has to describe them.
    const LAYOUT: &'static [Argument];

    /// Puts each into a slot, in order.
    fn put(&self, slots: &mut Slots);
}

/// What a kernel can be given: numbers and addresses of at most 8 bytes, no structs.
pub trait Value: Copy {
    /// Pointer or number.
    const KIND: ArgumentKind;

    /// Its bits, in the first bytes of a slot.
    fn slot(self) -> u64;
}

impl<T> Value for DevicePtr<T> {
    const KIND: ArgumentKind = ArgumentKind::Pointer;

    fn slot(self) -> u64 {
        self.address()
    }
}

impl Value for u32 {
    const KIND: ArgumentKind = ArgumentKind::Value;

    fn slot(self) -> u64 {
        u64::from(self).to_le()
    }
}

impl Value for f32 {
    const KIND: ArgumentKind = ArgumentKind::Value;

    fn slot(self) -> u64 {
        self.to_bits().slot()
    }
}

impl Value for u64 {
    const KIND: ArgumentKind = ArgumentKind::Value;

    fn slot(self) -> u64 {
        self
    }
}

/// Offsets as the compilers lay arguments out: in order, each aligned to its size.
const fn layout<const N: usize>(arguments: [(&'static str, ArgumentKind, usize); N]) -> [Argument; N] {
    assert!(N <= super::launch::MAX_ARGUMENTS, "more arguments than a launch has slots for");
    let mut laid = [Argument { name: "", kind: ArgumentKind::Value, offset: 0, size: 0 }; N];
    let mut end = 0usize;
    let mut i = 0;
    while i < N {
        let (name, kind, size) = arguments[i];
        let offset = end.next_multiple_of(size);
        laid[i] = Argument { name, kind, offset, size };
        end = offset + size;
        i += 1;
    }
    laid
}

/// Declares kernels: groups that take the same arguments, and the names in each.
///
/// ```text
/// kernels! {
///     /// What the group does, and its launch shape.
///     Scale [scale_f32, scale_f16] {
///         /// Read and written.
///         values: DevicePtr<u8>,
///         /// How many.
///         n: u32,
///         /// Multiplied with.
///         by: f32,
///     }
/// }
/// ```
/// makes `struct Scale` with these fields, the constants `Scale::scale_f32` and `Scale::scale_f16`, and both their entries in
/// the module's `DECLARED`. Launched by `device.launch(&stream, Scale::scale_f32, Grid::x(8), &Scale { values, n, by })`.
macro_rules! kernels {
    ($( $(#[$doc:meta])* $group:ident [$($kernel:ident),+ $(,)?] {
        $( $(#[$field_doc:meta])* $field:ident : $type:ty ),+ $(,)?
    } )*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub struct $group {
                $( $(#[$field_doc])* pub $field: $type, )+
            }

            impl $crate::backend::hip::kernels::Arguments for $group {
                const LAYOUT: &'static [$crate::backend::hip::kernels::Argument] =
                    &$crate::backend::hip::kernels::layout([$( (
                        stringify!($field),
                        <$type as $crate::backend::hip::kernels::Value>::KIND,
                        size_of::<$type>(),
                    ) ),+]);

                fn put(&self, slots: &mut $crate::backend::hip::launch::Slots) {
                    $( slots.push($crate::backend::hip::kernels::Value::slot(self.$field)); )+
                }
            }

            #[allow(non_upper_case_globals)] // the names of the kernels
            impl $group {
                $(
                    #[doc = concat!("`", stringify!($kernel), "`")]
                    pub const $kernel: $crate::backend::hip::kernels::Kernel<Self> =
                        $crate::backend::hip::kernels::Kernel::new(stringify!($kernel));
                )+
            }
        )*

        /// The kernels declared here.
        pub(super) const DECLARED: &[$crate::backend::hip::kernels::Declaration] = &[
            $( $( $crate::backend::hip::kernels::Declaration {
                name: stringify!($kernel),
                arguments: <$group as $crate::backend::hip::kernels::Arguments>::LAYOUT,
            }, )+ )*
        ];
    };
}
use kernels;

#[cfg(test)]
mod tests {
    use super::super::launch::Slots;
    use super::*;

    kernels! {
        /// For the tests below.
        Sample [sample_a, sample_b] {
            /// A number.
            n: u32,
            /// An address.
            x: DevicePtr<f32>,
            /// A number.
            scale: f32,
            /// A number.
            seed: u64,
        }
    }

    #[test]
    fn arguments_lie_where_a_c_compiler_puts_them() {
        #[repr(C)]
        struct AsInC {
            n: u32,
            x: *const f32,
            scale: f32,
            seed: u64,
        }
        let want = [
            ("n", ArgumentKind::Value, std::mem::offset_of!(AsInC, n), 4),
            ("x", ArgumentKind::Pointer, std::mem::offset_of!(AsInC, x), 8),
            ("scale", ArgumentKind::Value, std::mem::offset_of!(AsInC, scale), 4),
            ("seed", ArgumentKind::Value, std::mem::offset_of!(AsInC, seed), 8),
        ];
        let found: Vec<_> = Sample::LAYOUT.iter().map(|a| (a.name, a.kind, a.offset, a.size)).collect();
        assert_eq!(found, want);
        assert_eq!(DECLARED.iter().map(|kernel| kernel.name).collect::<Vec<_>>(), ["sample_a", "sample_b"]);
        assert_eq!(
            [Sample::sample_a, Sample::sample_b].map(|kernel| kernel.name()),
            ["sample_a", "sample_b"]
        );
    }

    #[test]
    fn the_first_bytes_of_a_slot_are_the_value() {
        let mut slots = Slots::default();
        Sample { n: 7, x: DevicePtr::NULL, scale: 1.5, seed: u64::MAX - 1 }.put(&mut slots);
        let bytes: Vec<[u8; 8]> = slots.as_mut().iter().map(|slot| slot.to_ne_bytes()).collect();
        assert_eq!(bytes[0][..4], 7u32.to_ne_bytes());
        assert_eq!(bytes[1], [0; 8]);
        assert_eq!(bytes[2][..4], 1.5f32.to_ne_bytes());
        assert_eq!(bytes[3], (u64::MAX - 1).to_ne_bytes());
    }

    #[test]
    fn every_kernel_has_its_own_name() {
        let mut names: Vec<&str> = declared().map(|kernel| kernel.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}

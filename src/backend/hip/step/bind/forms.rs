//! Forms that rows of a value take for their weights.

use crate::backend::ActivationType;
use crate::backend::hip::kernels::thresholds::Family;
use crate::backend::hip::step::Modes;
use crate::tensor::DType;

/// A form of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// 8-bit codes with scales and sums.
    A8,
    /// f32.
    Float,
    /// f16 with a scale for each row: for matrix products of many rows.
    Half,
}

/// All forms.
pub const FORMS: [Form; 3] = [Form::A8, Form::Float, Form::Half];

/// A set of forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forms(u8);

impl Forms {
    /// The set with one form.
    pub const fn of(form: Form) -> Self {
        Self(1 << form as u8)
    }

    /// Whether the set contains a form.
    pub fn has(self, form: Form) -> bool {
        self.0 & Self::of(form).0 != 0
    }

    /// The form, if the set has exactly one.
    pub fn only(self) -> Option<Form> {
        FORMS.into_iter().find(|form| self == Self::of(*form))
    }

    /// The union with another set.
    pub fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The set without one form.
    pub fn without(self, form: Form) -> Self {
        Self(self.0 & !Self::of(form).0)
    }
}

/// Forms that a value's readers want.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Forms in a step of few rows.
    pub few: Forms,
    /// Forms in a step of many rows.
    pub many: Forms,
    /// Rows that are many; any number where both sets are the same.
    many_from: usize,
}

impl Wanted {
    /// Only f32.
    pub const FLOAT: Self = Self::always(Form::Float);

    /// One form at any row count.
    pub const fn always(form: Form) -> Self {
        Self { few: Forms::of(form), many: Forms::of(form), many_from: 0 }
    }

    /// Forms that a product wants, given the matrix type and columns, in steps of at most `rows` rows.
    pub fn by_product(modes: Modes, dtype: DType, cols: u32, rows: usize) -> Self {
        let few = form(modes, dtype, 1, cols);
        let many_from = modes.thresholds().half_from;
        if rows < many_from {
            return Self::always(few);
        }
        Self::either(few, form(modes, dtype, many_from as u32, cols), many_from)
    }

    /// The form that experts' gate and up matrices want of rows, and down matrices of pairs, in steps of at most `rows`
    /// rows. `dtype` is the type of the matrices that read.
    pub fn by_experts(modes: Modes, dtypes: [DType; 2], dtype: DType, rows: usize) -> Self {
        let few = pair_form(modes.activations, dtype);
        match modes.sorted_from(dtypes) {
            Some(0 | 1) => Self::always(Form::Half),
            Some(from) if rows >= from => Self::either(few, Form::Half, from),
            _ => Self::always(few),
        }
    }

    /// One form below `many_from` rows, another one from there on.
    fn either(few: Form, many: Form, many_from: usize) -> Self {
        if many == few {
            return Self::always(few);
        }
        Self { few: Forms::of(few), many: Forms::of(many), many_from }
    }

    /// Forms wanted at this row count.
    pub fn at(self, rows: u32) -> Forms {
        if rows as usize >= self.many_from { self.many } else { self.few }
    }

    /// The union with another reader's forms.
    pub fn and(self, other: Self) -> Self {
        let many_from = self.many_from.max(other.many_from);
        Self { few: self.few.and(other.few), many: self.many.and(other.many), many_from }
    }

    /// Forms wanted at any row count.
    pub fn any(self) -> Forms {
        self.few.and(self.many)
    }

    /// Whether each row count wants exactly one form.
    pub fn is_single(self) -> bool {
        self.few.only().is_some() && self.many.only().is_some()
    }
}

/// Form in which `rows` rows of `cols` values are multiplied with weights of a type.
pub fn form(modes: Modes, dtype: DType, rows: u32, cols: u32) -> Form {
    match modes.family(dtype, rows, cols) {
        Family::GemvA8 => Form::A8,
        Family::GemvF32 => Form::Float,
        Family::GemmQuant | Family::GemmWide | Family::Expanded => Form::Half,
    }
}

/// Whether a step of `rows` rows sorts pairs of a row and an expert by expert.
pub fn are_grouped(modes: Modes, dtypes: [DType; 2], rows: u32) -> bool {
    modes.sorted_from(dtypes).is_some_and(|from| rows as usize >= from)
}

/// Form for pairs of a row and an expert that are not grouped: that of single rows.
pub fn pair_form(activations: ActivationType, dtype: DType) -> Form {
    if dtype.is_float() || activations == ActivationType::F32 { Form::Float } else { Form::A8 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::hip::kernels::MatrixUnit;

    #[test]
    fn sets_hold_what_was_put_in() {
        let both = Forms::of(Form::A8).and(Forms::of(Form::Half));
        assert!(both.has(Form::A8) && both.has(Form::Half) && !both.has(Form::Float));
        assert_eq!((both.only(), both.without(Form::A8).only()), (None, Some(Form::Half)));
        assert_eq!(Forms::default().only(), None);
    }

    #[test]
    fn many_rows_meet_other_forms_than_few_where_steps_have_as_many() {
        let modes = Modes { activations: ActivationType::Int8, ..Modes::default() };
        let wanted = |dtype, cols, rows| Wanted::by_product(modes, dtype, cols, rows);
        let forms = |wanted: Wanted| (wanted.few.only(), wanted.many.only());
        assert_eq!(forms(wanted(DType::Q4_K, 256, 64)), (Some(Form::A8), Some(Form::Half)));
        assert_eq!(forms(wanted(DType::Q4_K, 256, 63)), (Some(Form::A8), Some(Form::A8)));
        assert_eq!(forms(wanted(DType::F32, 256, 64)), (Some(Form::Float), Some(Form::Float)));
        assert_eq!(forms(wanted(DType::F16, 12, 64)), (Some(Form::Float), Some(Form::Float)));
        for unit in [MatrixUnit::OfWave, MatrixUnit::AcrossWaves] {
            let modes = Modes { unit, ..modes };
            let (gemm, from) =
                (|rows| Wanted::by_product(modes, DType::Q4_K, 256, rows), modes.thresholds().half_from);
            assert_eq!(forms(gemm(from)), (Some(Form::A8), Some(Form::Half)));
            let at = |rows| gemm(64).at(rows as u32).only();
            assert_eq!((at(from - 1), at(from)), (Some(Form::A8), Some(Form::Half)));
        }
        let exact = Modes { activations: ActivationType::F32, ..modes };
        let exact = Wanted::by_product(exact, DType::Q4_K, 256, 64);
        assert_eq!(exact, Wanted::FLOAT);
        assert!(!exact.and(wanted(DType::Q4_K, 256, 64)).is_single());
    }
}
